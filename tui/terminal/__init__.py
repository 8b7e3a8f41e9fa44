"""The terminal: bytes, cells, ASCII, clipboard."""
