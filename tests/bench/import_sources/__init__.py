"""Configurations of other tools, and the values that each tool itself gives their keys."""
