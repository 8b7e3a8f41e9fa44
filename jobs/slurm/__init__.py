"""Jobs that Slurm runs: handed in from here, supervised by a process in their allocation."""
