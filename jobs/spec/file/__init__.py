"""Jobs as files and flags: read, written, compared, kept as templates."""
