"""Report a run to experiment trackers: a separate process for each, which follows the events."""
