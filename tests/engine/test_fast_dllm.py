"""Fast-dLLM v2 in the one loop, token for token against a plain loop over transformers' Qwen2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench, Call
from helpers import ask, dkv, threshold
from llama_checkpoints import load
from qwen_checkpoints import Qwen, block_mask, qwen, save_fast_dllm
from transformers import DynamicCache

from mmserve.core.request import Diffusion, Policy, Request
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
NONE, BLOCK, DUAL = Policy(name="none"), Policy(name="block"), Policy(name="dual")
TEXTS = ("a red circle", "what is left of it? " * 3, "?", "ab", "circles")


def prompt_of(bench: Bench, text: str) -> list[int]:
    [encoded] = bench.engine.stages.encoder.encode([ask("x", text)])
    return encoded.ids.tolist()


def answer(bench: Bench, call: Call) -> list[int]:
    prompt = call.finished().usage.prompt_tokens
    return bench.canvases[call.request.id][0][prompt:].tolist()


def outcome(bench: Bench, call: Call) -> tuple[Any, ...]:
    done = call.finished()
    tokens, committed = bench.canvases[call.request.id]
    return done.text, done.reason, done.forwards, tokens.tolist(), committed.tolist()


class Passes:
    """Passes over a row of transformers' model, and K/V of the last whole one."""

    def __init__(self, oracle: Qwen, row: torch.Tensor, block: int, mask: int) -> None:
        self.oracle, self.row, self.block, self.mask, self.count = oracle, row, block, mask, 0
        self.held = DynamicCache(config=oracle.config)

    def whole(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable token, but for the mask, of each position up to ``end``, and its probability."""
        seen, self.held = min(end, len(self.row)), DynamicCache(config=self.oracle.config)
        mask = block_mask(seen, self.block)
        return self._best(self.oracle(input_ids=self.row[None, :seen], attention_mask=mask, cache=self.held).logits[0])

    def part(self, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of each position of a part, but for its first, from that part alone and K/V of all others."""
        others, places = DynamicCache(config=self.oracle.config), torch.arange(len(self.row))
        held = places[: self.held.get_seq_length()]
        outside = (held < here.start) | (held >= here.stop)
        for i, layer in enumerate(self.held.layers):
            others.update(layer.keys[:, :, outside], layer.values[:, :, outside], i)
        size = here.stop - here.start
        seen = torch.zeros(1, 1, size, size + int(outside.sum()))
        rows = {"input_ids": self.row[None, here], "position_ids": places[None, here]}
        return self._best(self.oracle(**rows, attention_mask=seen, cache=others).logits[0, :-1])

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        probabilities = logits.softmax(-1)
        probabilities[:, self.mask] = -1.0
        sure, token = probabilities.max(-1)
        nothing = torch.zeros(1)
        return torch.cat([nothing, sure]), torch.cat([nothing.long(), token])


@torch.no_grad()
def plain(
    oracle: Qwen,
    prompt: list[int],
    new: int,
    *,
    block: int,
    part: int,
    mask: int,
    sure_at: float | None,
    cached: bool = False,
) -> tuple[list[int], int]:
    """The authors' ``generate`` without temperature; its tokens, and passes over the row.

    Blocks lie on a grid from position 0, and a position sees to the end of its own. A block's first token is the best
    one of the last row before it, when all of that is known. Then its parts are filled one after another, with masks
    right of them: of each pass the surest token, and those that are at least ``sure_at``. ``cached``
    (``use_block_cache``): only the first pass over a block, and those that predict a part's first position, run all of
    the block; the others run the part, between K/V as the last of those left them.
    """
    row, fixed = torch.tensor(prompt + [mask] * new), len(prompt)
    passes = Passes(oracle, row, block, mask)
    for start in range(fixed // block * block, len(row), block):
        if start >= fixed:
            row[start] = passes.whole(start)[1][start]
        begun = False
        for first in range(start, min(start + block, len(row)), part):
            here = slice(first, min(first + part, len(row)))
            while (open_ := row[here] == mask).any():
                if cached and begun and row[first] != mask:
                    sure, token = passes.part(here)
                else:
                    sure, token = (each[here] for each in passes.whole(start + block))
                    begun = True
                sure = sure.masked_fill(~open_, -1.0)
                chosen = sure == sure.max()
                if sure_at is not None:
                    chosen |= sure >= sure_at
                row[here][chosen] = token[chosen]
    return row[fixed:].tolist(), passes.count


@pytest.fixture(scope="module")
@torch.no_grad()
def oracle() -> Qwen:
    """Sharp attention: what is predicted depends on what surrounds it."""
    made = qwen("qwen2")
    for name, weight in made.named_parameters():
        if "q_proj" in name:
            weight *= 2
    return made


def served(oracle: Qwen, folder: Path, **changes: Any) -> LoadedModel:
    """The model with an end of text that no test's answer meets."""
    model = load(save_fast_dllm(oracle, folder, **changes))
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


@pytest.fixture(scope="module")
def model(oracle: Qwen, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return served(oracle, tmp_path_factory.mktemp("fast"), bd_size=16)


#: Whether every text is asked about in every way.
EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])


@EVERY
@pytest.mark.parametrize(("block", "part"), [(32, 8), (8, 8), (4, 2)])
def test_tokens_and_passes_are_those_of_the_authors_loop(
    bench: Make, tmp_path: Path, oracle: Qwen, block: int, part: int, every: bool
) -> None:
    made = served(oracle, tmp_path, bd_size=block)
    b = bench(made, stages="inline")
    kinds: set[int] = set()
    ends: set[int] = set()
    saved = 0
    for i, text in enumerate(TEXTS[: 2 if block == 32 else None]):
        prompt = prompt_of(b, text)
        ends.add(len(prompt) % block)
        lengths = 2 * block - 2, 2 * block - len(prompt) % block  # the last block cut, and whole
        one_by_one = lengths if every else lengths[i % 2 : i % 2 + 1]
        for new, sure_at in (*((new, None) for new in one_by_one), *((new, 0.1) for new in lengths)):
            expected, passes = plain(
                oracle, prompt, new, block=block, part=part, mask=made.spec.mask_id, sure_at=sure_at
            )
            for policy in (NONE, BLOCK):
                name = f"{policy.name} {new} {sure_at} {text}"
                commit = threshold(sure_at) if sure_at else None
                asked = 0 if part == made.spec.sub_block else part
                [call] = b.submit(ask(name, text, max_new_tokens=new, block=asked, recompute=policy, commit=commit))
                assert (answer(b, call), call.finished().forwards) == (expected, passes)
            saved += new - passes
            kinds |= set(expected)
    assert len(kinds) > 20, "the model says more than one token"
    assert saved > 0, "the threshold makes several tokens known at once"
    assert len(ends) >= 2, "the prompt ends at several places of a block"


@EVERY
@pytest.mark.parametrize(("block", "part"), [(16, 8), (16, 4), (8, 8)])
def test_the_cache_of_sub_blocks_is_the_authors(
    bench: Make, tmp_path: Path, oracle: Qwen, block: int, part: int, every: bool
) -> None:
    made = served(oracle, tmp_path, bd_size=block)
    b = bench(made, stages="inline")
    differ = run = 0
    for i, (text, sure_at) in enumerate(product(TEXTS[1:], (None, 0.1))):
        if (i + i // 2) % 2 and not every:
            continue
        prompt = prompt_of(b, text)
        numbers = {"block": block, "part": part, "mask": made.spec.mask_id, "sure_at": sure_at}
        expected, passes = plain(oracle, prompt, 3 * block - 1, **numbers, cached=True)
        commit = threshold(sure_at) if sure_at else None
        calls = [
            b.submit(ask(f"{p.name} {text} {sure_at}", text, max_new_tokens=3 * block - 1, block=part, **more))[0]
            for p in (DUAL, BLOCK)
            if (more := {"recompute": p, "commit": commit})
        ]
        assert (answer(b, calls[0]), calls[0].finished().forwards) == (expected, passes)
        differ += answer(b, calls[1]) != expected
        run += calls[1].finished().recomputed_tokens - calls[0].finished().recomputed_tokens
    assert (differ > 0, run > 0) == (part < block,) * 2, "K/V that are not those of the tokens there do matter"


def test_a_prompt_that_ends_with_its_block(bench: Make, model: LoadedModel, oracle: Qwen) -> None:
    """Its last row alone predicts the answer's first token."""
    b = bench(model, stages="inline")
    texts = (f"red{'!' * more}" for more in range(16))
    text = next(each for each in texts if len(prompt_of(b, each)) % 16 == 0)
    prompt = prompt_of(b, text)
    expected, passes = plain(oracle, prompt, 16, block=16, part=8, mask=model.spec.mask_id, sure_at=None)
    [call] = b.submit(ask("ends", text, max_new_tokens=16, recompute=BLOCK))
    done = call.finished()
    assert (answer(b, call), done.forwards, passes) == (expected, 16, 16)
    assert done.recomputed_tokens == len(prompt) + 15 * 16


def mixed(policies: tuple[Policy, ...]) -> list[Request]:
    """Requests that differ in prompt, length, sub-blocks, policies, seed and temperature."""
    commits = (None, threshold(0.2), Policy(name="random"), Policy(name="entropy_bound", options={"bound": 4.0}))
    return [
        ask(
            f"r{i}",
            "red circle " * (i % 4) + f"{i}",
            max_new_tokens=[1, 7, 20, 41][i % 4],
            block=[0, 2, 16][i % 3],
            steps=[0, 0, 0, 9][i % 4],
            recompute=policies[i % len(policies)],
            commit=commits[i % 5 % 4],
            temperature=[0.0, 0.0, 1.1][i % 3],
            seed=i,
        )
        for i in range(14)
    ]


@pytest.mark.parametrize("config", [{}, {"page_size": 1, "decode_tokens": 100}, {"max_running": 3, "stages": "inline"}])
def test_tokens_are_the_same_alone_and_in_a_batch(bench: Make, model: LoadedModel, config: dict[str, Any]) -> None:
    requests = mixed((BLOCK, NONE, DUAL))
    single = bench(model, stages="inline")
    alone = {r.id: outcome(single, single.submit(r)[0]) for r in requests}
    b = bench(model, **config)
    for tensor in (*b.engine.stages.store.keys, *b.engine.stages.store.values):
        tensor.fill_(torch.nan)
    for call in b.submit(*requests):
        assert outcome(b, call) == alone[call.request.id]


def test_tokens_are_the_same_with_the_cache_and_without(bench: Make, model: LoadedModel) -> None:
    b = bench(model, stages="inline")
    for request in mixed((NONE,)):
        diffusion = dataclasses.replace(request.diffusion, recompute=BLOCK)
        other = dataclasses.replace(request, id=f"{request.id}-block", diffusion=diffusion)
        assert outcome(b, b.submit(request)[0]) == outcome(b, b.submit(other)[0])


def test_pages_of_a_prompt_are_shared(bench: Make, model: LoadedModel) -> None:
    b = bench(model, stages="inline")
    text = "what is left of the red circle? " * 3
    for policy in (BLOCK, DUAL):
        first, again = (
            outcome(b, b.submit(ask(f"{name} {policy.name}", text, recompute=policy))[0]) for name in ("first", "again")
        )
        assert first == again
        assert b.ask(ask("third", text, recompute=policy)).usage.cached_tokens > 16


def test_a_policy_that_edits_judges_all_of_a_block_at_once(bench: Make, model: LoadedModel) -> None:
    """Its passes are not those of the authors: it has candidates for the block's other positions from the first on."""
    b = bench(model, stages="inline", watch=False)
    edit = Policy(name="edit", options={"confidence": 0.2, "edit_confidence": 0.1})
    done = b.ask(ask("edit", max_new_tokens=30, recompute=BLOCK, commit=edit))
    assert done.usage.completion_tokens == 30 and done.edits > 0


def test_a_policy_that_edits_sees_nothing_that_no_pass_has_run(bench: Make, model: LoadedModel) -> None:
    """All of a block is seen while its first part is filled: none of that is what pages held before."""
    b = bench(model, stages="inline", watch=False)
    for tensor in (*b.engine.stages.store.keys, *b.engine.stages.store.values):
        tensor.fill_(torch.nan)
    for confidence in (0.2, 2.0):
        edit = Policy(name="edit", options={"confidence": confidence, "edit_confidence": confidence})
        asked = [ask(f"{p.name} {confidence}", max_new_tokens=60, recompute=p, commit=edit) for p in (NONE, BLOCK)]
        expected, found = ((done.text, done.forwards, done.edits) for done in map(b.ask, asked))
        assert found == expected


def test_what_it_can_do(bench: Make, model: LoadedModel) -> None:
    b = bench(model, stages="inline")
    info = b.engine.info
    assert (info.diffusion, info.block_length, info.recompute_policies) == (True, 8, ("block", "none", "dual"))
    assert (info.recompute_policy, info.commit_policy, info.decisions) == ("block", "threshold", "together")
    assert info.tuning.default.commit.options["confidence"] == 0.9
    with pytest.raises(Unimplemented, match="has no recompute policy 'dkv_decode'; it has block, none, dual"):
        b.submit(ask("dkv", recompute=dkv()))
    for wrong in (3, 32):
        with pytest.raises(InvalidArgument, match=r"block_length: must divide 16: the model decodes blocks of 16, or"):
            b.submit(ask("wrong", block=wrong))
    plain_request = b.ask(dataclasses.replace(ask("plain"), diffusion=Diffusion()))
    assert plain_request.text == b.ask(ask("block", block=8, recompute=BLOCK)).text
