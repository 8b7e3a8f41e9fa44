"""Weight files: locate tensors, read rows of shards, and write tensor by tensor."""
