"""Jobs: their description, queue and supervision. Depends on neither the dashboard nor torch."""
