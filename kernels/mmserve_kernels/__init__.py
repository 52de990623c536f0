"""Attention and K/V cache kernels: each op has a PyTorch reference, which is its specification, and a CPU path."""
