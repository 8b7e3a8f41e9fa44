"""Find the repeated blocks of a model: build it without weights, walk it, recommend a set."""
