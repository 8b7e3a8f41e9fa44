"""Screens that lie over the dashboard: help, questions."""
