"""Commands about this machine, and about fsdp-tui on it."""
