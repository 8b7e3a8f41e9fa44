"""Actions and their keys: tables, a person's own keymap, key lines, help."""
