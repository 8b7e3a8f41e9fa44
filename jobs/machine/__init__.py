"""The machine: its devices, and processes on it."""
