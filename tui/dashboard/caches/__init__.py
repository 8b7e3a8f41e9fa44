"""The caches screen: sizes, and clearing."""
