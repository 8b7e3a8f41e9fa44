"""LoRA and LoKr: their layers, files, and the frozen adapter of training."""
