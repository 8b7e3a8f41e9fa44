"""Tests against a stand-in for the driver's library."""
