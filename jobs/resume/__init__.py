"""Resuming a checkpoint: which one, with what, and what that changes."""
