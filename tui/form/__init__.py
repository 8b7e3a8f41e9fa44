"""The form that describes a new job."""
