"""A job's model on fake tensors: what one step does to memory."""
