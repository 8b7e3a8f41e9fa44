"""Tell a person about a job where they are: by a command of theirs, or a service they chose."""
