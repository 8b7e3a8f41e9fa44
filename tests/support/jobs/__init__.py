"""Helpers of the tests of jobs: fake ranks, made-up files, real runs."""
