"""Tests of `fsdp-tui doctor`."""
