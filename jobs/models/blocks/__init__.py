"""The repeated blocks of a model: asked of the engine, and remembered."""
