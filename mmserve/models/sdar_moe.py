"""SDAR with experts (arXiv 2510.06303; ``JetLM/SDAR-30B-A3B-Chat``): Qwen3-MoE's tensors, decoded in blocks."""

from __future__ import annotations

from mmserve.models.block_diffusion import load
from mmserve.models.qwen_moe import LAYOUT, dimensions

__all__ = ["LAYOUT", "dimensions", "load"]
