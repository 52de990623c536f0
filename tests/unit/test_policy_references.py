"""Policies against transcriptions of their authors' code, over whole decodes of random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import EntropyBoundScheduler
from helpers import blank, proposal, sure_above

from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.request import Sampling
from mmserve.decode.commit.edit import Edit
from mmserve.decode.commit.entropy_bound import EntropyBound
from mmserve.decode.commit.factor import Factor
from mmserve.decode.commit.learned import Learned
from mmserve.decode.commit.ngram import Ngram
from mmserve.decode.commit.threshold import Threshold
from mmserve.decode.pace import random_order
from mmserve.decode.recompute.adaptive import Adaptive
from mmserve.decode.recompute.dkv_decode import DkvDecode
from mmserve.decode.recompute.dkv_greedy import DkvGreedy
from mmserve.decode.sampler import candidates


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


# --- dKV-Cache (horseee/dKV-Cache at 49a76fc, generation_utils) ---


class KnownLate:
    """``llada_dkv_cache_decode.py``: the cache that a step reads is of what was known two steps before it."""

    def __init__(self, every: int) -> None:
        self.every, self.step = every, 0
        self.before_last: set[int] = set()
        self.last: set[int] = set()

    def run(self, size: int) -> set[int]:
        cached = self.step % self.every != 0 and self.step > 1
        return set(range(size)) - (self.before_last if cached else set())

    def known(self, positions: set[int]) -> None:
        self.before_last, self.last, self.step = self.last, positions, self.step + 1


@pytest.mark.parametrize("every", [1, 2, 3, 8])
def test_dkv_decode_runs_the_positions_of_its_code(every: int) -> None:
    rng = np.random.default_rng(every)
    canvas, policy = blank(5, 33, 12), DkvDecode(refresh=every)
    short = 0
    while canvas.block_start < canvas.size:
        reference, start = KnownLate(every), canvas.block_start  # each block begins without a cache
        while canvas.block_start == start:
            rows = set(policy.rows(canvas).tolist())
            assert rows == reference.run(canvas.size)
            short += len(rows) < canvas.size
            canvas.count_forward()
            made = rng.permutation(canvas.block_masked())[: rng.integers(1, 4)]
            canvas.commit(np.sort(made), np.full(len(made), 7))
            reference.known(set(np.flatnonzero(~canvas.masked).tolist()))
    assert (short == 0) == (every == 1)


def greedy_rows(order: list[int], done: int, now: int, due: int, masked: np.ndarray, window: int) -> set[int]:
    """``llada_dkv_cache_greedy.py``: positions that the next step runs, after one that took ``now`` of ``order`` from
    ``done`` on; the next one takes ``due``. ``masked``: as it was before this step."""
    taken, coming = order[done : done + now], order[done + now : done + now + due]
    marked = np.zeros(len(masked), dtype=bool)
    marked[coming] = marked[taken] = True
    for position in coming:
        left, right, count, is_left = position - 1, position + 1, 0, True
        while count < window and not (left < 0 and right > len(masked)):
            at = left if is_left else right
            if 0 <= at < len(masked) and masked[at] and not marked[at]:
                marked[at] = True
                count += 1
            left, right, is_left = (left - 1, right, False) if is_left else (left, right + 1, True)
    return set(np.flatnonzero(marked).tolist())


@pytest.mark.parametrize(("every", "window", "steps"), [(2, 4, 18), (3, 0, 36), (5, 2, 12), (4, 50, 9)])
def test_dkv_greedy_runs_the_positions_of_its_code(every: int, window: int, steps: int) -> None:
    canvas = blank(6, 36, 12)
    policy, of_block = DkvGreedy(refresh=every, window=window, steps=steps, seed=3), steps // 3
    counts = [12 // of_block + (i < 12 % of_block) for i in range(of_block)]
    for _block in range(3):
        order, expected, done = random_order(canvas, 3).tolist(), set(range(canvas.size)), 0
        for step, count in enumerate(counts):
            rows = set(policy.rows(canvas).tolist())
            assert rows == (expected if step % every else set(range(canvas.size)))
            before = canvas.masked
            canvas.count_forward()
            canvas.commit(np.sort(order[done : done + count]), np.full(count, 7))
            due = counts[step + 1] if step + 1 < of_block else 0
            expected = greedy_rows(order, done, count, due, before, window)
            done += count


# --- Fast-dLLM (NVlabs/Fast-dLLM at f6b35ec, llada/generate.py) ---


def by_threshold(confidence: list[float], limit: float) -> set[int]:
    """``get_transfer_index`` with a ``threshold``."""
    order = sorted(range(len(confidence)), key=lambda i: -confidence[i])
    return {i for nth, i in enumerate(order) if nth == 0 or confidence[i] >= limit}


def by_factor(confidence: list[float], factor: float) -> set[int]:
    """``get_transfer_index_dynamic``, without its ``top_i += 1`` where only the last candidate fails, which takes that
    one, too."""
    order = sorted(range(len(confidence)), key=lambda i: -confidence[i])
    limits = [-1.0, *(1 - factor / (n + 1) for n in range(2, len(order) + 1))]
    count = next((n for n, i in enumerate(order) if confidence[i] < limits[n]), len(order))
    return set(order[:count])


@pytest.mark.parametrize("seed", range(20))
def test_threshold_and_factor_take_the_candidates_of_their_code(seed: int) -> None:
    rng = np.random.default_rng(seed)
    canvas = blank(2, int(rng.integers(1, 20)), 20)
    shown = proposal(canvas, (rng.random(len(canvas.block_masked())) ** 0.3).astype(np.float32))
    confidence = shown.confidence.tolist()
    for number in (0.3, 0.8, 0.95, 1.0):
        assert set(np.flatnonzero(Threshold(number).choose(canvas, shown))) == by_threshold(confidence, number)
        assert set(np.flatnonzero(Factor(number).choose(canvas, shown))) == by_factor(confidence, number)


# --- LLaDA2.1 (sgl-project/sglang at 17d5721, srt/dllm/algorithm/joint_threshold.py) ---


def joint_threshold(
    block: list[int],
    given: list[bool],
    best: np.ndarray,
    sure: np.ndarray,
    limits: tuple[float, float],
    post: list[int],
) -> tuple[list[int], bool]:
    """A pass over a block: its tokens afterwards (None is a mask), and whether it is final. ``post``: passes over the
    full block so far, and how many there may be."""
    is_open = [token == MASKED for token in block]
    fills = {i for i, open_ in enumerate(is_open) if open_ and sure[i] > limits[0]}
    if any(is_open):
        fills = fills or {max((i for i, open_ in enumerate(is_open) if open_), key=lambda i: sure[i])}
    else:
        post[0] += 1
        if post[0] > post[1]:
            return block, True
    edits = {
        i
        for i, token in enumerate(block)
        if not is_open[i] and not given[i] and token != best[i] and sure[i] > limits[1]
    }
    changed = fills | edits
    return [int(best[i]) if i in changed else token for i, token in enumerate(block)], not changed


@pytest.mark.parametrize("passes", [0, 1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_edit_decodes_a_block_as_sglang(passes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    canvas, policy = blank(3, 20, 20), Edit(confidence=0.8, edit_confidence=0.7, passes=passes)
    canvas.commit(np.array([5, 9]), np.array([1, 2]))  # given before the first pass
    block, post = [MASKED] * 20, [0, passes]
    block[2], block[6] = 1, 2
    given = [token != MASKED for token in block]
    final, edited, made = False, 0, 0
    while not final:
        best, sure = rng.integers(0, 4, 20), rng.random(20).astype(np.float32)
        if made > 40:
            sure[:] = 0.0  # the model has made up its mind
        block, final = joint_threshold(block, given, best, sure, (0.8, 0.7), post)
        if canvas.block_start == canvas.size:
            continue  # the last pass of SGLang only stores keys and values
        canvas.count_forward()
        shown = proposal(canvas, sure, best, positions=canvas.block())
        chosen = shown.where(policy.choose(canvas, shown))
        old = ~canvas.masked[chosen.positions]
        canvas.edit(chosen.positions[old], chosen.tokens[old])
        canvas.commit(chosen.positions[~old], chosen.tokens[~old], hold=True)
        if policy.is_final(canvas, int(old.sum())):
            canvas.advance()
        edited, made = edited + int(old.sum()), made + 1
        assert [MASKED if m else t for m, t in zip(canvas.masked[3:], canvas.tokens[3:].tolist(), strict=True)] == block
    assert canvas.block_start == canvas.size
    assert edited > 0


# --- EB-Sampler (diffusers' ``EntropyBoundScheduler``, at a temperature of 1) ---


@pytest.mark.parametrize("bound", [0.05, 0.5, 2.0, 8.0])
def test_entropy_bound_accepts_the_positions_that_diffusers_does(bound: float) -> None:
    canvas, policy = blank(2, 24, 24), EntropyBound(bound=bound)
    scheduler = EntropyBoundScheduler(entropy_bound=bound, t_max=1.0, t_min=1.0, num_inference_steps=4)
    taken = set()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(24, 9, generator=generator) * torch.linspace(0.5, 9, 24)[:, None]
        sample = torch.zeros(1, 24, dtype=torch.long)
        accepted = scheduler.step(logits[None].clone(), 0, sample, generator=generator).accepted_index[0]
        shown = candidates(logits.clone(), canvas.block_masked(), canvas, Sampling(), ())
        assert policy.choose(canvas, shown).tolist() == accepted.tolist()
        taken.add(int(accepted.sum()))
    assert max(taken) > 1


# --- prompt look-up (vllm-project/vllm at 016e8ed, vllm/v1/spec_decode/ngram_proposer.py) ---


def look_up(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The tokens after the earliest occurrence of as many of the last ones as occur before."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                return tokens[start + size : start + size + count]
    return []


def test_ngram_drafts_what_vllm_does() -> None:
    """In a text that repeats itself, the latest occurrence would leave few tokens to draft."""
    rng = np.random.default_rng(0)
    texts = [[1, 2, 3] * 5, [4] * 9, *(rng.integers(0, 3, rng.integers(2, 25)).tolist() for _ in range(60))]
    drafted = []
    for text in texts:
        canvas = Canvas.create(np.array(text), new_tokens=20, block_length=1, mask_id=9)
        draft = Ngram(length=6, longest=4, shortest=2).draft(canvas).tolist()
        assert draft == look_up(text, 2, 4, 6)
        drafted.append(len(draft))
    assert drafted[:2] == [6, 5]
