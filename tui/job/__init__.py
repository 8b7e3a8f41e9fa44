"""The screen of one job: what it is, what its ranks do, what it made, and what happened to it."""
