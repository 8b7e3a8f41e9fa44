"""Command lines of diffusers' training scripts."""
