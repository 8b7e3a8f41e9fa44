"""The full-screen log: reading, searching, filtering, copying."""
