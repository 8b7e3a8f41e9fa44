"""Tests of the fleet, below the dashboard."""
