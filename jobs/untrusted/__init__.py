"""Files and texts that others may have written."""
