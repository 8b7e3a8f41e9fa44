"""What ranks do that tests start."""
