"""A job's checkpoints: the screen, and what both fronts say of them."""
