"""Rules across keys: derived values, keys without effect, and invalid combinations. Pure."""
