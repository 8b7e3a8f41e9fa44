"""Before a rank is one: accelerate's launcher, imports, command lines of tools."""
