"""Ranks: process groups, file barriers, agreement on requests, and telemetry."""
