"""A run on disk: paths, events, samples, checkpoints."""
