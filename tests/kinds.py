"""A model of each kind of decoding: two that the package brings, and two tiny random ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from gemma_checkpoints import save_gemma
from qwen_checkpoints import qwen, save_sdar

from mmserve.config import ModelConfig

#: Tokens of a block of the block-diffusion model.
BLOCK = 8
#: Names of the models: masked diffusion, block diffusion, uniform-state diffusion, autoregressive.
MASKED, BLOCKS, RANDOM, CAUSAL = "bundled", "blocks", "random", "bundled-causal"
KINDS = (MASKED, BLOCKS, RANDOM, CAUSAL)


def every_kind(folder: Path, prepare_blocks: Callable[[Path], None] = lambda _saved: None) -> tuple[ModelConfig, ...]:
    """The models, those of random weights saved below ``folder``; ``prepare_blocks`` may change the block-diffusion
    one."""
    for name in (BLOCKS, RANDOM):
        (folder / name).mkdir()
    torch.manual_seed(5)
    blocks = save_sdar(qwen("qwen3"), folder / BLOCKS, block_size=BLOCK)
    prepare_blocks(blocks)
    noise = save_gemma(folder / RANDOM, 12)
    return (
        ModelConfig(path="bundled"),
        ModelConfig(path="bundled-causal"),
        ModelConfig(path=str(blocks), name=BLOCKS, dtype="float32", device="cpu"),
        ModelConfig(path=str(noise), name=RANDOM, dtype="float32", device="cpu"),
    )
