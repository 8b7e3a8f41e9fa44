"""Tests of what reaches other machines."""
