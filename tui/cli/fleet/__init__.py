"""Commands that reach other machines."""
