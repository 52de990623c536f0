"""Reuse of image K/V that were computed for each image alone, with selective recompute of some positions."""
