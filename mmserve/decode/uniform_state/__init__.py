"""Uniform-state diffusion: models that denoise canvases of random tokens."""
