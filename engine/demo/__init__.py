"""The demo: a small trained FLUX.1 that draws colored shapes, and images of one it cannot draw."""
