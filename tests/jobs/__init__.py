"""Tests of jobs: none of them needs torch."""
