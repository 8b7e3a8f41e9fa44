"""Ranks: who they are, how they wait for each other, and what they report."""
