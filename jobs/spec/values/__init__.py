"""Values as people write them: types, spellings, datasets, lines of YAML."""
