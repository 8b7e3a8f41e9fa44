"""Code that runs before a rank starts: accelerate's launcher, imports, command lines of tools."""
