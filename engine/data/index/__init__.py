"""Which samples there are, and which of them each step trains on."""
