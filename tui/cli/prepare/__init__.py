"""Commands for before a job is queued."""
