"""Python processes forked from a server that has imported what ranks import."""
