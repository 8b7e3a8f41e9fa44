"""Noise, targets and loss: the training objectives of diffusion models."""
