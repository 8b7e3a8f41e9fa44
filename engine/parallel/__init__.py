"""How a model is split over ranks, and proof that it was."""
