"""The fields of the form."""
