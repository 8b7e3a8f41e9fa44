"""Rules across keys: what follows, what means nothing, what cannot run. Pure."""
