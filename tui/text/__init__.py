"""Formatting of numbers, tables and facts for the command line and the screens. Pure."""
