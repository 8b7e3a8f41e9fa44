"""The fleet screen, which shows several machines, and visits to each."""
