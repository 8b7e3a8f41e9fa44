"""A stand-in for NVIDIA's management library that plays GPUs on machines that have none.

`stub` builds it and says what it plays, `fixture` gives it to tests, `play.py` runs a command with
it. Test modules ask for the fixtures with `pytest_plugins = ["tests.tests.nvml_stub.fixture"]`.
"""
