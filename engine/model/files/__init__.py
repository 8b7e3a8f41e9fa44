"""Weights in files: what lies where, read as rows of shards, written tensor by tensor."""
