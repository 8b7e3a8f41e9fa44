"""The doctor's checks, one subject per file. None of them imports the list of all checks."""
