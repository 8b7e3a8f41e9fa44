"""The dashboard application: how it starts, its themes, its notifications."""
