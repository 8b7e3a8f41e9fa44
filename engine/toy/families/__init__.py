"""A toy of each family."""
