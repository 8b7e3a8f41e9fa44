"""A supervisor and its job on a played clock: what happens to both is up to the test.

The supervisor is the real one. Made up are the time that passes, the processes, the disk and
Slurm's commands; see `rig.Rig` for what a test can do, and `local` and `slurm` for the two kinds.
"""
