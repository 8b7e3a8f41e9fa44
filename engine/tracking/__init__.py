"""Report a run to experiment trackers, in a separate process per tracker that follows the
events."""
