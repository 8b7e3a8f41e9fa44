"""The description of a job: its keys, their rules, and the files it is read from."""
