"""The checks of the doctor, one subject a file. None imports the list of all."""
