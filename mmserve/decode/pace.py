"""How many tokens each step of a block commits, and in which order a random one takes them: LLaDA's schedule.

Recompute and commit policies both ask: a policy that runs few positions must know which ones come next.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas

#: Odd constants that spread (seed, block) over the generator's seeds.
_SEED_MIX, _BLOCK_MIX = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def tokens_of_step(canvas: Canvas, steps: int, done: int) -> int:
    """Tokens that the block's step number ``done`` (from 0) commits, of ``steps`` for the whole canvas.

    The block's tokens, but for those that stood there from the start, are spread evenly over its steps, the remainder
    over the first ones (ML-GSAI/LLaDA, generate.py). ``steps`` 0 means one token a step; blocks share the steps by
    length. The last step takes what is left, which is at most a whole block.
    """
    length = canvas.block_to_fill()
    total = steps or canvas.new_tokens
    own = steps_of_block(canvas, total)
    if done >= own - 1:
        return length
    return length // own + (done < length % own)


def steps_of_block(canvas: Canvas, total: int) -> int:
    """The current block's share of ``total`` steps for the whole canvas: one at least, one an open position at most."""
    left, right = (p - canvas.prompt_length for p in (canvas.block_start, canvas.block_end))
    share = total * right // canvas.new_tokens - total * left // canvas.new_tokens
    return min(max(1, share), canvas.block_to_fill())


def random_order(canvas: Canvas, seed: int) -> np.ndarray:
    """The current block's positions (int64 ``[block]``) in an order drawn once a block: the same for the same seed."""
    mixed = (seed * _SEED_MIX + (canvas.block_start - canvas.prompt_length + 1) * _BLOCK_MIX) % (1 << 64)
    return canvas.block_start + np.random.default_rng(mixed).permutation(canvas.block_end - canvas.block_start)


def next_in_order(canvas: Canvas, order: np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` positions of ``order`` that are still masked."""
    return order[canvas.masked[order]][:count]
