"""Helpers of the dashboard's tests."""
