"""The screen of the GPUs alone: graphs of their use and memory, and who is on them."""
