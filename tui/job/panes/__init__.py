"""The contents of the job screen's tabs."""
