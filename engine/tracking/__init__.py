"""Report a run to experiment trackers, each in a process that follows the events."""
