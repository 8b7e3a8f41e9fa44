"""Parse values as users write them: types, spellings, datasets, lines of YAML."""
