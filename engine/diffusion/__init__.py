"""Noise, targets and loss: what a diffusion model is trained to predict."""
