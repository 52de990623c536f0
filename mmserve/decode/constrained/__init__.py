"""Constrained requests in the decode loop: how one begins, and what of its witness each step makes final."""
