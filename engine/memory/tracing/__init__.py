"""Trace the memory of one training step by running a job's model on fake tensors."""
