"""Decide which samples exist, and which of them each step trains on."""
