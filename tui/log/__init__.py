"""A log on the whole screen: read, searched, filtered, copied from."""
