"""Checks for `jobs.doctor` that need torch: its build, the GPUs it sees, an all-reduce."""
