"""Commit policies token for token against their authors' rules, run over transformers' models of random weights."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from harness import Bench
from helpers import ask, threshold
from llada_checkpoints import llama, load, open_logits, own_config, own_name, write
from qwen_checkpoints import MASK_ID, Qwen, qwen, save_dream
from test_masked_families import TEXTS, answer, endless, prompt_of

from mmserve.core.request import Policy

Make = Callable[..., Bench]
MASK = 3
#: What a rule makes final after a pass: from the step (counted from 0), the row of tokens, the logits of all of it, and
#: the end of the block to a bool mask and the tokens.
Rule = Callable[[int, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def llada(mask_weight: float, seed: int = 0) -> Any:
    """A Llama whose tokens depend on what surrounds them, and whose mask token is as likely as ``mask_weight`` says."""
    oracle = llama(4, 4)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            if weight.dim() == 2:
                spread = 1.0 if "embed" in name else 3.0 / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
        oracle.lm_head.weight[MASK] = oracle.lm_head.weight.mean(0) + mask_weight * oracle.lm_head.weight[MASK]
    return oracle


def served(oracle: Any, folder: Path) -> Any:
    return endless(load(write(folder, own_config(oracle), {own_name(n): t for n, t in oracle.state_dict().items()})))


@torch.no_grad()
def reference(
    oracle: Any, prompt: list[int], new: int, block: int, steps: int, rule: Rule, scale: float = 0.0
) -> tuple[list[int], int]:
    """LLaDA's ``generate`` (ML-GSAI/LLaDA at b7e6c35, generate.py) with the choice of tokens left to ``rule``: the
    answer, and the passes it took.

    With ``scale`` above 0 a second row, whose prompt is masks, goes through the model, and logits are moved away from
    those that it gets.
    """
    row = torch.tensor(prompt + [MASK] * new)
    passes = 0
    for start in range(len(prompt), len(row), block):
        end, step = start + block, 0
        while (row[start:end] == MASK).any():
            logits = open_logits(oracle, oracle.model.embed_tokens(row[None]))[0]
            if scale > 0:
                blind = row.clone()
                blind[: len(prompt)] = MASK
                without = open_logits(oracle, oracle.model.embed_tokens(blind[None]))[0]
                logits = without + (scale + 1) * (logits - without)
            chosen, tokens = rule(step, row, logits, end)
            row = torch.where(chosen & (row == MASK), tokens, row)
            step, passes = step + 1, passes + 1
    return row[len(prompt) :].tolist(), passes


def judged(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's best token but for the mask, which LLaDA's code would commit, and its share of the whole softmax."""
    probabilities = logits.double().softmax(-1)
    tokens = probabilities.index_fill(-1, torch.tensor(MASK), -1.0).argmax(-1)
    return probabilities.gather(-1, tokens[:, None])[:, 0], tokens


def low_confidence(block: int, steps_of_block: int) -> Rule:
    """``remasking="low_confidence"``."""
    counts = [block // steps_of_block + (i < block % steps_of_block) for i in range(steps_of_block)]

    def rule(step: int, row: torch.Tensor, logits: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        confidence, tokens = judged(logits)
        confidence = confidence.masked_fill(row != MASK, -torch.inf)
        confidence[end:] = -torch.inf
        return torch.zeros_like(row, dtype=torch.bool).index_fill(
            0, confidence.topk(counts[step]).indices, True
        ), tokens

    return rule


def test_confidence_has_the_mask_token_in_its_softmax(bench: Make, tmp_path: Path) -> None:
    """Where the mask is likely, the order in which tokens become final depends on it."""
    oracle = llada(-2.0)
    b = bench(served(oracle, tmp_path), stages="inline")
    differ = 0
    for text in TEXTS:
        prompt = prompt_of(b, text)
        for steps in (6, 24):
            rule = low_confidence(12, steps // 2)
            expected, passes = reference(oracle, prompt, 24, 12, steps, rule)
            [call] = b.submit(ask(f"{steps} {text}", text, max_new_tokens=24, block=12, steps=steps))
            assert (answer(b, call), call.finished().forwards) == (expected, passes)

            def unmasked(*shown: Any, rule: Rule = rule) -> tuple[torch.Tensor, torch.Tensor]:
                shown[2][:, MASK] = -torch.inf
                return rule(*shown)

            differ += reference(oracle, prompt, 24, 12, steps, unmasked)[0] != expected
    assert differ, "the mask token's share decides nothing here"


def test_a_threshold_is_of_probabilities_among_all_tokens(bench: Make, tmp_path: Path) -> None:
    """Fast-dLLM's rule (NVlabs/Fast-dLLM, llada/generate.py): the softmax is that of LLaDA's code."""
    oracle = llada(-2.0)
    b = bench(served(oracle, tmp_path), stages="inline")

    def rule(step: int, row: torch.Tensor, logits: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        confidence, tokens = judged(logits)
        confidence = confidence.masked_fill(row != MASK, -1.0)
        confidence[end:] = -1.0
        return (confidence >= 0.1) | (confidence == confidence.max()), tokens

    passes = []
    for text in TEXTS:
        expected = reference(oracle, prompt_of(b, text), 24, 12, 24, rule)
        [call] = b.submit(ask(text, text, max_new_tokens=24, block=12, commit=threshold(0.1)))
        assert (answer(b, call), call.finished().forwards) == expected
        passes.append(expected[1])
    assert min(passes) < 24


# --- Prophet ---


def prophet(base: Rule, first: int, gaps: tuple[float, float, float], steps: int, seen: list[float]) -> Rule:
    """Early exit (pixeli99/Prophet at 460afe4, generate_earlyexit.py): five answer positions from ``first`` on.

    All of them count, whatever stands there; steps are counted over the whole generation, from 1.
    """

    def rule(step: int, row: torch.Tensor, logits: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        top = logits[first : min(first + 5, len(row))].topk(2, -1).values
        gap = float((top[:, 0] - top[:, 1]).double().mean())
        seen.append(gap)
        progress = len(seen) / steps
        if gap >= gaps[0 if progress < 0.33 else 1 if progress < 0.67 else 2]:
            return torch.ones_like(row, dtype=torch.bool), judged(logits)[1]
        return base(step, row, logits, end)

    return rule


def test_early_commit_exits_where_prophet_does(bench: Make, tmp_path: Path) -> None:
    oracle = llada(0.0)
    b = bench(served(oracle, tmp_path), stages="inline")
    exits = set()
    for text in TEXTS[::2]:
        prompt = prompt_of(b, text)
        for start in (2, 9, 22):  # in the first block, across two, and cut by the canvas
            for gaps in ((2.5, 2.0, 1.5), (9.0, 1.8, 1.2), (9.0, 9.0, 1.0)):
                rule = prophet(low_confidence(12, 6), len(prompt) + start, gaps, 12, [])
                expected = reference(oracle, prompt, 24, 12, 12, rule)
                options = dict(zip(("early", "middle", "late"), gaps, strict=True))
                options |= {"answer_start": start, "answer_length": min(5, 24 - start)}
                commit = Policy(name="early_commit", options=options)
                name = f"{start} {gaps} {text}"
                [call] = b.submit(ask(name, text, max_new_tokens=24, block=12, steps=12, commit=commit))
                assert (answer(b, call), call.finished().forwards) == expected, name
                exits.add(expected[1])
    assert len(exits) >= 4 and 12 in exits


def test_a_final_answer_is_not_sure_by_itself(bench: Make, tmp_path: Path) -> None:
    """Gaps that can never be met change nothing, whichever block the answer is in."""
    b = bench(served(llada(0.0), tmp_path), stages="inline")
    never = {"early": 1e9, "middle": 1e9, "late": 1e9, "answer_length": 4}
    commit = Policy(name="early_commit", options=never)
    [plain, early] = b.submit(
        ask("plain", max_new_tokens=32, block=4), ask("early", max_new_tokens=32, block=4, commit=commit)
    )
    assert early.finished().forwards == plain.finished().forwards == 32
    assert answer(b, early) == answer(b, plain)


# --- Dimple ---


@torch.no_grad()
def dimple(oracle: Qwen, prompt: list[int], new: int, steps: int, sure: float) -> tuple[list[int], list[int]]:
    """Confident decoding (yu-rp/Dimple at 848f132, models/generation_utils.py): the answer, and how many tokens each
    pass made final. ``decoding_pipeline`` is ``dim``, ``alg`` is ``maskgit_plus``, ``alg_p_threshold`` is ``sure``.

    Where no candidate is sure, the step goes to the first point of the grid that is past its own number and leaves at
    least one token less. The grid falls from 1 to ``eps``, which is 0 here (``eps=1e-3`` puts off one token at every
    point, to the last one), in exact numbers (fp32 may put off one more).
    """
    row = torch.tensor(prompt + [MASK_ID] * new)
    grid = [1 - Fraction(i, steps) for i in range(steps + 1)]
    taken: list[int] = []
    for i in range(steps):
        open_ = (row == MASK_ID).nonzero()[:, 0]
        if not len(open_):
            break
        logits = oracle(input_ids=row[None], attention_mask=torch.zeros(1, 1, len(row), len(row))).logits[0]
        probabilities = logits[open_ - 1].double().softmax(-1)
        tokens = probabilities.index_fill(-1, torch.tensor(MASK_ID), -1.0).argmax(-1)
        confidence = probabilities.gather(-1, tokens[:, None])[:, 0]
        chosen = confidence > sure if i < steps - 1 else torch.ones_like(confidence, dtype=torch.bool)
        if not chosen.any():
            share = Fraction(len(open_), new)
            at = max(next(j for j, point in enumerate(grid) if point < share), i + 1)
            count = 0
            while count < 1:
                count = int(len(open_) * (1 - grid[at] / share)) if at < steps else len(open_)
                at += 1
            chosen = torch.zeros_like(chosen).index_fill(0, confidence.topk(count).indices, True)
        row[open_[chosen]] = tokens[chosen]
        taken.append(int(chosen.sum()))
    return row[len(prompt) :].tolist(), taken


def test_confident_goes_to_dimples_time_grid(bench: Make, tmp_path: Path) -> None:
    oracle = qwen("qwen2")
    b = bench(endless(load(save_dream(oracle, tmp_path))), stages="inline")
    last: list[int] = []
    shapes = set()
    for text in TEXTS[:2]:
        prompt = prompt_of(b, text)
        for new, steps in ((24, 8), (23, 9), (7, 1)):
            for sure in (0.15, 0.25, 0.35, 1.0):
                expected, taken = dimple(oracle, prompt, new, steps, sure)
                name = f"{new} {steps} {sure} {text}"
                commit = Policy(name="confident", options={"confidence": sure})
                request = ask(name, text, max_new_tokens=new, block=new, steps=steps, commit=commit)
                [call] = b.submit(request)
                assert answer(b, call) == expected, name
                committed = b.canvases[name][1][len(prompt) :].tolist()
                assert [committed.count(i + 1) for i in range(len(taken))] == taken, name
                shapes.add(tuple(taken))
                last += [taken[-1]] if (new, steps) == (24, 8) and len(taken) == 8 else []
    assert len(shapes) > 5
    assert max(last) <= 4, "a step that lags catches up: the last one takes no more than the others"
