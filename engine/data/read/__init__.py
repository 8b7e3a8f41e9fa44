"""Read pixels and captions from folders, tables, images and videos."""
