"""Nemotron-Labs-Diffusion (arXiv 2607.05722), token by token: ``nvidia/Nemotron-Labs-Diffusion-*``.

The weights are Ministral 3's under other names, and decode autoregressively as that does. Their other two modes are not
implemented: denoising in blocks, which are counted from the prompt's end and whose K/V are made by a causal pass once a
block is final, and the self-speculation that verifies such a block.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.models.llama import load
from mmserve.models.ministral import dimensions
from mmserve.models.nested import layout_below

__all__ = ["LAYOUT", "dimensions", "load"]

LAYOUT = replace(
    layout_below("encoder", "diffusion_head"),
    name="nemotron_labs_diffusion",
    architecture="NemotronLabsDiffusionModel",
)
