"""Encode pixels and captions into cached tensors."""
