"""What is reported of a dataset before it is trained on."""
