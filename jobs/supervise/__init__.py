"""One process per job: launch its ranks, watch and stop them, and record how they ended."""
