"""What a job's data is: as text for the command line, and as a screen of the dashboard."""
