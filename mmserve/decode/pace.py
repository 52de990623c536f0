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

    The block's tokens, but for those that were there from the start, are spread evenly over its steps, the remainder
    over the first ones (ML-GSAI/LLaDA, generate.py). ``steps`` 0 means one token a step; blocks share the steps by
    length. The last step takes what is left, which is at most a whole block.
    """
    length = canvas.block_to_fill()
    total = steps or canvas.new_tokens
    own = steps_of_block(canvas, total)
    if done >= own - 1:
        return length
    return length // own + (done < length % own)


def tokens_to_grid(canvas: Canvas, steps: int, done: int) -> int:
    """Tokens that bring the block to its time grid after step number ``done`` (from 0): Dimple's schedule.

    With S steps for the block's T tokens, ceil(T (S - j) / S) are left masked after j steps. A step aims at the first j
    past its own number at which fewer are left than now, so one that lags catches up, and one that is ahead goes on to
    the next point (yu-rp/Dimple, generation_utils.py, ``decoding_pipeline="dim"``). ``steps`` as of ``tokens_of_step``.
    """
    length, masked = canvas.block_to_fill(), len(canvas.block_masked())
    own = steps_of_block(canvas, steps or canvas.new_tokens)
    points = (-(-length * (own - j) // own) for j in range(done + 1, own))
    return masked - next((left for left in points if left < masked), 0)


def steps_of_block(canvas: Canvas, total: int) -> int:
    """The current block's share of ``total`` steps for the whole canvas: one at least, one an open position at most."""
    left, right = (p - canvas.prompt_length for p in (canvas.block_start, canvas.block_end))
    share = total * right // canvas.new_tokens - total * left // canvas.new_tokens
    return min(max(1, share), canvas.block_to_fill())


def steps_of_whole_block(canvas: Canvas, total: int) -> int:
    """The share of ``total`` steps of a whole block where the current one is: one at least, one a position at most.

    A first block that begins within the prompt, or a last one that the canvas cuts, counts as if all of it were open.
    """
    left = canvas.block_of(canvas.block_start) - canvas.prompt_length
    right = left + canvas.block_length
    share = total * right // canvas.new_tokens - total * left // canvas.new_tokens
    return min(max(1, share), canvas.block_length)


def random_order(canvas: Canvas, seed: int) -> np.ndarray:
    """The current block's positions (int64 ``[block]``) in an order drawn once a block: the same for the same seed."""
    mixed = (seed * _SEED_MIX + (canvas.block_start - canvas.prompt_length + 1) * _BLOCK_MIX) % (1 << 64)
    return canvas.block_start + np.random.default_rng(mixed).permutation(canvas.block_end - canvas.block_start)


def next_in_order(canvas: Canvas, order: np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` positions of ``order`` that are still masked."""
    return order[canvas.masked[order]][:count]
