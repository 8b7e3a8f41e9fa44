"""Ways to start ranks on devices."""
