"""Models on disk: their location, sizes and repeated blocks."""
