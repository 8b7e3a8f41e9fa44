"""Commands about queued, running and ended jobs."""
