"""Configurations of ltx-trainer."""
