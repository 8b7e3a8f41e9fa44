"""Turn images into batches: index, buckets, the global batch plan, caches."""
