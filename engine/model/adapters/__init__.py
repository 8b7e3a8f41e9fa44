"""LoRA and LoKr: layers, files, and the frozen training adapter."""
