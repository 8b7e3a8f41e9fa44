"""ai-toolkit's configurations."""
