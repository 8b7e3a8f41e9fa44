"""Screens that lie over the dashboard: help, details, questions."""
