"""Change the code in small ways, and see whether the fast tests notice: `python -m tests.mutation`.

Well-kept tools were looked at first. mutmut 3 and cosmic-ray run every mutant in a process that
imports torch and diffusers for 6 CPU-seconds, choose no seeded sample, and mutmut rewrites each
function into trampolines, which `torch.compile`, `inspect` and pickled functions notice;
pytest-mutagen wants each mutant written by hand. This is what is left to do without them.
"""
