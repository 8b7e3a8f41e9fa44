"""What is kept so that it need not be made again: how large it is, and clearing it."""
