"""What a job is and how it lives. Knows neither the screen nor torch."""
