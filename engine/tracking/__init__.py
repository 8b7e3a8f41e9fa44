"""Report a run to experiment trackers: a process of its own for each, which follows the events."""
