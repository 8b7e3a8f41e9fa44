"""Samples while training."""
