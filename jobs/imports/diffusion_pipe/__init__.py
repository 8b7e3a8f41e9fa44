"""Jobs of diffusion-pipe."""
