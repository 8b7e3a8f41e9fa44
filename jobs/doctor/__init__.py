"""`fsdp-tui doctor`: look at a machine the way a job will meet it, and say what to do.

Facts are gathered first (`checks`, `nvml`, …), each within a time limit of its
own; what they mean is decided by pure functions. All of it runs in a process of its own (`ask`),
because a driver that hangs takes along whoever asks it.
"""
