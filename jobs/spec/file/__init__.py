"""Jobs as files and flags: read, written, compared, and saved as templates."""
