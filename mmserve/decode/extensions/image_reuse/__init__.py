"""Reuse of images' K/V that were computed where each image was alone, and selective recompute of some of them."""
