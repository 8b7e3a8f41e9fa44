"""The description of a job: its keys, the rules between them, and its files."""
