"""From images to batches: index, buckets, the global batch plan, caches."""
