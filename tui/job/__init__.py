"""The screen of one job: its settings, ranks, outputs and history."""
