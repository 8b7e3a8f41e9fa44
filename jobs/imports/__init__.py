"""Jobs of other tools' configurations. `jobs.imports.imported` makes them."""
