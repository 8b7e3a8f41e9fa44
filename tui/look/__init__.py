"""Looking at jobs and devices again and again, in threads. Knows no widgets."""
