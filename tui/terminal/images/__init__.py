"""Images in the terminal: by a graphics protocol where it has one, else in half blocks."""
