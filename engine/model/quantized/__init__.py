"""A frozen base in 8 or 4 bits: packed, and computed with."""
