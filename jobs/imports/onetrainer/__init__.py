"""Jobs of OneTrainer."""
