"""`fsdp-tui doctor`: check a machine the way a job will use it, and say what to do.

The checks (`checks`, `nvml`, …) first gather facts, each within its own time limit; pure functions
then judge them. Everything runs in a separate process, because a driver that hangs also hangs every
process that queries it.
"""
