"""Light stand-ins for the launcher and the ranks; the supervisor around them is the real one."""
