"""Models as files: where they are, how large, and which blocks repeat in them."""
