"""Attention and cache kernels: each op has its PyTorch reference, the specification and the CPU path."""
