"""One process per job: launch it, watch it, stop it, and say how it ended."""
