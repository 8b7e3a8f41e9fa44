"""Curves of what runs measured: viewing, comparing, exporting."""
