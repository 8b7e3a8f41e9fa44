"""Images as people have them."""
