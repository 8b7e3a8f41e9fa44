"""Numbers, tables and facts as text, for the command line and the screens. Pure."""
