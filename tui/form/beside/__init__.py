"""What stands beside the fields of the form."""
