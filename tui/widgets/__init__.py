"""Reusable one-purpose widgets."""
