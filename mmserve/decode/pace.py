"""LLaDA's schedule: the number of tokens that each step of a block commits, and the order of random remasking.

Used by commit policies, and by recompute policies that run few positions and must include those committed next.
"""

from __future__ import annotations

import numpy as np

from mmserve.core.canvas import Canvas

#: Odd multipliers that map (seed, block) to seeds of the generator.
_SEED_MIX, _BLOCK_MIX = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def tokens_of_step(canvas: Canvas, steps: int, done: int) -> int:
    """The number of tokens that step ``done`` (from 0) of the block commits; ``steps``: for the whole canvas, 0 = one
    token a step.

    The block's tokens, except given ones, are distributed evenly over its steps, the remainder over the first ones
    (ML-GSAI/LLaDA, generate.py). Blocks share the steps by length. The last step commits all that is left, at most a
    whole block.
    """
    length = canvas.block_to_fill()
    total = steps or canvas.new_tokens
    own = steps_of_block(canvas, total)
    if done >= own - 1:
        return length
    return length // own + (done < length % own)


def tokens_to_grid(canvas: Canvas, steps: int, done: int) -> int:
    """The number of tokens after which the block is at its time grid after step ``done`` (from 0): Dimple's schedule.

    With S steps for the block's T tokens, ceil(T (S - j) / S) are masked after j steps. A step's target is the first j
    after its own number with fewer masked tokens than now, so that a block that lags catches up, and one that is ahead
    continues to the next point (yu-rp/Dimple, generation_utils.py, ``decoding_pipeline="dim"``). ``steps``: see
    ``tokens_of_step``.
    """
    length, masked = canvas.block_to_fill(), len(canvas.block_masked())
    own = steps_of_block(canvas, steps or canvas.new_tokens)
    points = (-(-length * (own - j) // own) for j in range(done + 1, own))
    return masked - next((left for left in points if left < masked), 0)


def steps_of_block(canvas: Canvas, total: int) -> int:
    """The current block's share of ``total`` steps for the whole canvas: at least 1, at most its open positions."""
    left, right = (p - canvas.prompt_length for p in (canvas.block_start, canvas.block_end))
    share = total * right // canvas.new_tokens - total * left // canvas.new_tokens
    return min(max(1, share), canvas.block_to_fill())


def steps_of_whole_block(canvas: Canvas, total: int) -> int:
    """The share of ``total`` steps that a whole block has at the current block: at least 1, at most its positions.

    A first block that begins within the prompt, or a last one that the canvas truncates, counts as fully open.
    """
    left = canvas.block_of(canvas.block_start) - canvas.prompt_length
    right = left + canvas.block_length
    share = total * right // canvas.new_tokens - total * left // canvas.new_tokens
    return min(max(1, share), canvas.block_length)


def random_order(canvas: Canvas, seed: int) -> np.ndarray:
    """The current block's positions (int64 ``[block]``) in random order; deterministic for a block and ``seed``."""
    mixed = (seed * _SEED_MIX + (canvas.block_start - canvas.prompt_length + 1) * _BLOCK_MIX) % (1 << 64)
    return canvas.block_start + np.random.default_rng(mixed).permutation(canvas.block_end - canvas.block_start)


def next_in_order(canvas: Canvas, order: np.ndarray, count: int) -> np.ndarray:
    """The first ``count`` positions of ``order`` that are still masked."""
    return order[canvas.masked[order]][:count]
