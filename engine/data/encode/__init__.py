"""From pixels and captions to cached tensors."""
