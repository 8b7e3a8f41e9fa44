"""A stand-in for CUDA that computes nothing, so that jobs on GPUs run on machines that have none.

`stub` finds a torch that was built for CUDA and compiles the library, `fixture` gives both to
tests, `ranks` does many jobs in one process. README.md says what it plays and what it does not.
"""
