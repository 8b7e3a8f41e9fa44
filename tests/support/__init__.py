"""Helpers of the tests: made-up jobs, fake ranks, images, terminals."""
