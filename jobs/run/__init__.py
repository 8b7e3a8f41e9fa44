"""A run as it lies on the disk: paths, events, samples, checkpoints."""
