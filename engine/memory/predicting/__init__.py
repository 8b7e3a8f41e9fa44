"""From a trace to bytes per rank: arithmetic."""
