"""The machine's devices, and processes on it."""
