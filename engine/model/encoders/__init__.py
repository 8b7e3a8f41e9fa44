"""Text encoders: which a model has, loaded whole or as shards."""
