"""Several machines on one screen, and a visit to each."""
