"""What lies behind the tabs of the job screen."""
