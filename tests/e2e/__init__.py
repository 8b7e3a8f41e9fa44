"""Real jobs, from the command line to the export."""
