"""Jobs on a cluster: Slurm places them, and their batch script supervises them there."""
