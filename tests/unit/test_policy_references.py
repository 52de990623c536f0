"""``learned`` and ``adaptive`` against transcriptions of their authors' code, over whole decodes of random numbers."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import blank, proposal, sure_above

from mmserve.core.canvas import MASKED
from mmserve.decode.commit.learned import Learned
from mmserve.decode.recompute.adaptive import Adaptive


def learn2pd(
    confidence: np.ndarray, trust: np.ndarray, is_open: np.ndarray, step: int, steps: int, limit: float
) -> set[int]:
    """ims-kdks/Learning-to-Parallel-Decoding, ``generate_learn2parallel`` of ``generate.py`` (commit 4718f15): open
    positions of a block that become final in a step, of ``steps`` for the block."""
    base, remainder = divmod(len(confidence), steps)
    scheduled = base + (step < remainder)
    found = {i for i in range(len(confidence)) if is_open[i] and trust[i] > limit}
    best = sorted(np.flatnonzero(is_open).tolist(), key=lambda i: (-confidence[i], i))
    return found | set(best[:scheduled])


@pytest.mark.parametrize("seed", range(12))
def test_learned_decodes_a_block_as_its_code(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, steps = int(rng.integers(8, 33)), int(rng.integers(2, 9))
    canvas = blank(2, length, length)
    policy = Learned(commit_filter=sure_above(0.9), steps=steps, end_of_text=False)
    step = 0
    while len(canvas.block_masked()):
        assert step < steps
        confidence = rng.random(length).astype(np.float32)
        is_open = canvas.committed_at[2:] == MASKED
        seen = np.where(is_open, confidence, np.float32(1))
        wanted = learn2pd(confidence, policy.commit_filter.trust(seen, is_open), is_open, step, steps, 0.96)
        canvas.count_forward()
        candidates = proposal(canvas, confidence[is_open])
        made = candidates.positions[policy.choose(canvas, candidates)]
        assert set((made - 2).tolist()) == wanted
        canvas.commit(made, np.full(len(made), 7), hold=True)
        step += 1


def dllm_cache(
    step: int, prompt: int, cosine: np.ndarray, prompt_interval: int, interval: int, ratio: float
) -> set[int]:
    """maomaocun/dLLM-cache, ``cache_hook_feature`` and ``refresh_index`` of ``cache_hook_LLaDA.py`` and intervals of
    ``Cache.py`` (commit 17235bf): positions that a layer after the first runs in a step, counted from 0."""
    found = set(range(prompt)) if step % prompt_interval == 0 else set()
    if step % interval == 0:
        return found | set(range(prompt, prompt + len(cosine)))
    least = sorted(range(len(cosine)), key=lambda i: (cosine[i], i))[: int(len(cosine) * ratio)]
    return found | {prompt + i for i in least}


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.6])
def test_adaptive_runs_the_positions_of_its_code_and_those_to_be_decided(ratio: float) -> None:
    rng = np.random.default_rng(5)
    canvas = blank(6, 24, 8)
    policy = Adaptive(prompt_refresh=9, response_refresh=4, ratio=ratio)
    last: set[int] = set()
    for step in range(23):
        cosine = rng.uniform(-1, 1, 24).astype(np.float32)
        watched = policy.watched(canvas)
        rows = set(policy.rows(canvas, 1 - cosine if len(watched) else None).tolist())
        open_now = set(canvas.block_masked().tolist())
        assert rows == dllm_cache(step, 6, cosine, 9, 4, ratio) | open_now | last
        canvas.count_forward()
        last = {int(rng.choice(canvas.block_masked()))}
        canvas.commit(np.array(sorted(last)), np.array([7]))
