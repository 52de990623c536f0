"""Masked diffusion models other than LLaDA in the one loop, token for token against plain loops over transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import Bench, Call
from helpers import ask, dkv, threshold
from llada2_checkpoints import glm
from llada2_checkpoints import save as save_llada2
from llama_checkpoints import load
from qwen_checkpoints import MASK_ID, Qwen, block_mask, qwen, save_dream, save_sdar

from mmserve.core.request import Diffusion, Policy, Request
from mmserve.decode.passes import Passes
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import LoadedModel

Make = Callable[..., Bench]
NONE, BLOCK = Policy(name="none"), Policy(name="block")
TEXTS = ("a red circle", "what is left of it? " * 3, "?")


def endless(model: LoadedModel) -> LoadedModel:
    """The model with an end of text that no test's answer meets: answers run to their full length."""
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, end_ids=frozenset({-1})))


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


def mixed(block: int, policies: tuple[Policy, ...], count: int = 14) -> list[Request]:
    """Requests that differ in prompt, length, policy, seed and temperature."""
    return [
        ask(
            f"r{i}",
            "red circle " * (i % 4) + f"{i}",
            max_new_tokens=[1, 7, 12, 21][i % 4],
            block=[block, 0][i % 2],
            recompute=policies[i % len(policies)],
            commit=threshold(0.3) if i % 5 == 2 else None,
            temperature=[0.0, 0.0, 1.1][i % 3],
            seed=i,
        )
        for i in range(count)
    ]


def alone(model: LoadedModel, requests: list[Request]) -> dict[str, tuple[Any, ...]]:
    """The outcome of each request by itself."""
    b = Bench(model, stages="inline")
    found = {r.id: outcome(b, b.submit(r)[0]) for r in requests}
    b.close()
    return found


def best_but_the_mask(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's most probable token that is not the mask, and its share of the softmax over all, the mask included."""
    probabilities = logits.softmax(-1)
    probabilities[:, MASK_ID] = -1.0
    return probabilities.max(-1)


# --- Dream: full attention, logits shifted by one ---


@torch.no_grad()
def plain_dream(oracle: Qwen, prompt: list[int], new: int, block: int) -> list[int]:
    """Dream's ``diffusion_generate`` with ``maskgit_plus``, one token a step: what each step commits is best sure.

    Row j-1 predicts position j; every step runs the whole row, and blocks are filled from left to right.
    """
    row = torch.tensor(prompt + [MASK_ID] * new)
    for start in range(len(prompt), len(row), block):
        here = slice(start, min(start + block, len(row)))
        while (row[here] == MASK_ID).any():
            logits = oracle(input_ids=row[None], attention_mask=torch.zeros(1, 1, len(row), len(row))).logits[0]
            sure, token = best_but_the_mask(logits[here.start - 1 : here.stop - 1])
            best = int(sure.masked_fill(row[here] != MASK_ID, -1.0).argmax())
            row[start + best] = token[best]
    return row[len(prompt) :].tolist()


@pytest.fixture(scope="module")
def dream_oracle() -> Qwen:
    return qwen("qwen2")


@pytest.fixture(scope="module")
def dream(dream_oracle: Qwen, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return endless(load(save_dream(dream_oracle, tmp_path_factory.mktemp("dream"))))


@pytest.mark.parametrize("block", [12, 8], ids=["one block", "blocks of 8"])
def test_dream_gives_the_tokens_of_its_plain_loop(
    bench: Make, dream: LoadedModel, dream_oracle: Qwen, block: int
) -> None:
    b = bench(dream, stages="inline")
    kinds: set[int] = set()
    for text in TEXTS:
        expected = plain_dream(dream_oracle, prompt_of(b, text), 12, block)
        for policy in (NONE, dkv(1)):
            [call] = b.submit(ask(f"{policy.name} {text}", text, max_new_tokens=12, block=block, recompute=policy))
            assert answer(b, call) == expected
        kinds |= set(expected)
    assert len(kinds) > 9, "the model says more than one token"


def test_dream_reads_the_row_left_of_a_mask_even_where_it_was_cached(
    bench: Make, dream: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step but the full one runs the block of 13 and, as long as its first position is masked, the one before."""
    b = bench(dream, stages="inline")
    seen: list[tuple[set[int], set[int], set[int], bool]] = []
    original = Passes._over

    def watched(passes: Passes, canvas: Any, pages: Any, embeddings: Any, rows: Any, *rest: Any) -> Any:
        made = original(passes, canvas, pages, embeddings, rows, *rest)
        everything = len(rows) == canvas.size
        seen.append((set(rows.tolist()), set(made.rows.tolist()), set(canvas.block_masked().tolist()), everything))
        assert (np.diff(made.rows) > 0).all()
        return made

    monkeypatch.setattr(Passes, "_over", watched)
    done = b.ask(ask("cached", max_new_tokens=13, block=13, recompute=Policy(name="dual")))
    assert done.forwards == 13
    added = 0
    for asked, run, masked, everything in seen:
        assert run == asked | {position - 1 for position in masked}
        added += len(run - asked)
        assert everything or len(run) < done.usage.prompt_tokens
    assert added > 0, "without such a row nothing is proven"


DREAMS = mixed(5, (NONE, dkv(1), dkv(3), dkv()))


@pytest.fixture(scope="module")
def dreamt_alone(dream: LoadedModel) -> dict[str, tuple[Any, ...]]:
    return alone(dream, DREAMS)


@pytest.mark.parametrize("config", [{}, {"page_size": 1, "decode_tokens": 100}, {"max_running": 3, "stages": "inline"}])
def test_dream_gives_the_same_tokens_alone_and_in_a_batch(
    bench: Make, dream: LoadedModel, dreamt_alone: dict[str, tuple[Any, ...]], config: dict[str, Any]
) -> None:
    b = bench(dream, **config)
    for tensor in (*b.engine.stages.store.keys, *b.engine.stages.store.values):
        tensor.fill_(torch.nan)
    for call in b.submit(*DREAMS):
        assert outcome(b, call) == dreamt_alone[call.request.id]


def test_dream_with_refresh_one_is_dream_without_a_cache(bench: Make, dream: LoadedModel) -> None:
    b = bench(dream, stages="inline")
    for request in mixed(5, (NONE,), 8):
        diffusion = dataclasses.replace(request.diffusion, recompute=dkv(1))
        other = dataclasses.replace(request, id=f"{request.id}-dkv", diffusion=diffusion)
        assert outcome(b, b.submit(request)[0]) == outcome(b, b.submit(other)[0])


def test_dream_s_cache_does_matter(bench: Make, dream: LoadedModel, tmp_path: Path) -> None:
    b = bench(dream, stages="inline")
    differ = 0
    for text in TEXTS:
        calls = [b.submit(ask(f"{p} {text}", text, max_new_tokens=24, block=24, recompute=p))[0] for p in (NONE, dkv())]
        exact, cached = (call.finished() for call in calls)
        assert cached.recomputed_tokens < exact.recomputed_tokens
        differ += answer(b, calls[0]) != answer(b, calls[1])
    assert differ, "a cache that changes nothing would mean that it is never read"


# --- SDAR: block-causal attention ---


@torch.no_grad()
def plain_sdar(oracle: Any, prompt: list[int], new: int, block: int, sure_at: float | None = None) -> list[int]:
    """SDAR's ``block_diffusion_generate`` without its cache: blocks lie on a grid from position 0.

    One token a step is committed, the best sure one; with ``sure_at`` all that are at least so sure.
    """
    row = torch.tensor(prompt + [MASK_ID] * new)
    fixed = len(prompt)
    for start in range(fixed // block * block, len(row), block):
        end = min(start + block, len(row))
        open_ = (torch.arange(start, end) >= fixed) & (row[start:end] == MASK_ID)
        while open_.any():
            logits = oracle(input_ids=row[None, :end], attention_mask=block_mask(end, block)).logits[0, start:]
            sure, token = best_but_the_mask(logits)
            sure = sure.masked_fill(~open_, -1.0)
            chosen = sure == sure.max()
            if sure_at is not None:
                chosen |= sure >= sure_at
            row[start:end][chosen] = token[chosen]
            open_ &= ~chosen
    return row[fixed:].tolist()


@pytest.fixture(scope="module")
@torch.no_grad()
def sdar_oracle() -> Qwen:
    """Sharp attention and a faint mask: what is predicted at a mask depends on what surrounds it."""
    made = qwen("qwen3")
    made.get_input_embeddings().weight[MASK_ID] *= 0.2
    for name, weight in made.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            weight *= 2
    return made


@pytest.fixture(scope="module")
def sdar(sdar_oracle: Qwen, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return endless(load(save_sdar(sdar_oracle, tmp_path_factory.mktemp("sdar"))))


@pytest.mark.parametrize("size", [4, 8])
def test_sdar_gives_the_tokens_of_its_plain_loop(bench: Make, tmp_path: Path, sdar_oracle: Qwen, size: int) -> None:
    b = bench(endless(load(save_sdar(sdar_oracle, tmp_path, block_size=size))), stages="inline")
    kinds: set[int] = set()
    within: set[int] = set()
    saved: dict[float | None, int] = {None: 0, 0.1: 0}
    for i, text in enumerate((*TEXTS, "ab")):
        prompt = prompt_of(b, text)
        within.add(len(prompt) % size)
        new = 16 - len(prompt) % size if i % 2 else 14  # the last block whole, or cut
        for sure_at in saved:
            expected = plain_sdar(sdar_oracle, prompt, new, size, sure_at)
            for policy in (BLOCK,) if i % 2 else (NONE, BLOCK):
                name = f"{policy.name} {new} {sure_at} {text}"
                commit = threshold(sure_at) if sure_at else None
                [call] = b.submit(ask(name, text, max_new_tokens=new, recompute=policy, commit=commit))
                assert answer(b, call) == expected
                saved[sure_at] += new - call.finished().forwards
            kinds |= set(expected)
    assert len(kinds) > 20, "the model says more than one token"
    assert saved[None] == 0 < saved[0.1], "the threshold makes several tokens known at once"
    assert len(within) > 2, "the prompt ends at several places of a block"


BLOCKS = mixed(4, (BLOCK, NONE))


@pytest.fixture(scope="module")
def sdar_alone(sdar: LoadedModel) -> dict[str, tuple[Any, ...]]:
    return alone(sdar, BLOCKS)


@pytest.mark.parametrize("config", [{}, {"page_size": 1, "decode_tokens": 100}, {"max_running": 3, "stages": "inline"}])
def test_sdar_gives_the_same_tokens_alone_and_in_a_batch(
    bench: Make, sdar: LoadedModel, sdar_alone: dict[str, tuple[Any, ...]], config: dict[str, Any]
) -> None:
    b = bench(sdar, **config)
    for tensor in (*b.engine.stages.store.keys, *b.engine.stages.store.values):
        tensor.fill_(torch.nan)
    for call in b.submit(*BLOCKS):
        assert outcome(b, call) == sdar_alone[call.request.id]


def test_sdar_with_its_cache_is_sdar_without(bench: Make, sdar: LoadedModel) -> None:
    b = bench(sdar, stages="inline")
    for request in mixed(4, (NONE,), 8):
        other = dataclasses.replace(
            request, id=f"{request.id}-block", diffusion=dataclasses.replace(request.diffusion, recompute=BLOCK)
        )
        assert outcome(b, b.submit(request)[0]) == outcome(b, b.submit(other)[0])


def test_sdar_runs_a_block_a_step_and_a_finished_one_once_more(bench: Make, sdar: LoadedModel) -> None:
    b = bench(sdar, stages="inline")
    done = b.ask(ask("one", max_new_tokens=19, recompute=BLOCK))
    prompt, size = done.usage.prompt_tokens, done.usage.prompt_tokens + 19
    expected = min(prompt // 4 * 4 + 4, size)  # prefill
    for position in range(prompt + 1, size):  # each pass makes one token known, from block to block
        first = position // 4 * 4
        expected += min(first + 4, size) - (first - 4 if position % 4 == 0 else first)
    assert done.recomputed_tokens == expected


def test_what_block_diffusion_can_do(bench: Make, sdar: LoadedModel) -> None:
    b = bench(sdar, stages="inline")
    info = b.engine.info
    assert (info.diffusion, info.block_length, info.recompute_policy) == (True, 4, "block")
    assert info.recompute_policies == ("block", "none", "dual")
    with pytest.raises(Unimplemented, match="has no recompute policy 'dkv_decode'; it has block, none, dual"):
        b.submit(ask("dkv", recompute=dkv()))
    with pytest.raises(InvalidArgument, match=r"diffusion\.block_length: must divide 4: the model decodes blocks of 4"):
        b.submit(ask("long", block=8))
    plain = b.ask(dataclasses.replace(ask("plain"), diffusion=Diffusion()))
    assert plain.text == b.ask(ask("block", block=4, recompute=BLOCK)).text


# --- LLaDA2.0: the same with experts ---


@pytest.fixture(scope="module")
@torch.no_grad()
def glm_oracle() -> Any:
    made = glm()
    made.get_input_embeddings().weight[MASK_ID] *= 0.2
    return made


def test_llada2_gives_the_tokens_of_its_plain_loop(bench: Make, tmp_path: Path, glm_oracle: Any) -> None:
    b = bench(endless(load(save_llada2(glm_oracle, tmp_path))), stages="inline")
    assert b.engine.info.block_length == 32
    kinds: set[int] = set()
    for text in TEXTS[1:2]:
        expected = plain_sdar(glm_oracle, prompt_of(b, text), 36, 32)
        for policy in (NONE, BLOCK):
            [call] = b.submit(ask(f"{policy.name} {text}", text, max_new_tokens=36, recompute=policy))
            assert answer(b, call) == expected
        kinds |= set(expected)
    assert len(kinds) > 10, "the model says more than one token"


class Judge(torch.nn.Module):
    """What diffusers' pipeline takes for a model: a 2-D mask of what there is comes in, logits come out."""

    device = torch.device("cpu")

    def __init__(self, oracle: Any, block: int) -> None:
        super().__init__()
        self.oracle, self.block = oracle, block

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> Any:
        mask = block_mask(ids.shape[1], self.block)
        mask = mask.masked_fill(attention_mask[:, None, None] == 0, torch.finfo(torch.float32).min)
        logits = self.oracle(input_ids=ids, attention_mask=mask, position_ids=position_ids).logits
        logits[..., MASK_ID] = -torch.inf
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("sure", [1.0, 0.15])
def test_llada2_gives_the_tokens_of_diffusers_pipeline(
    bench: Make, tmp_path: Path, glm_oracle: Any, sure: float
) -> None:
    import diffusers  # slow to import: only this test needs it

    pipeline = diffusers.LLaDA2Pipeline(Judge(glm_oracle, 8), diffusers.BlockRefinementScheduler(block_length=8))
    pipeline.set_progress_bar_config(disable=True)
    b = bench(endless(load(save_llada2(glm_oracle, tmp_path, block_size=8))), stages="inline")
    saved = 0
    for text, new in zip(TEXTS[1:], (19, 13), strict=True):
        expected = pipeline(
            input_ids=torch.tensor([prompt_of(b, text)]),
            gen_length=new,
            num_inference_steps=8,
            threshold=sure,
            editing_threshold=None,
            eos_early_stop=False,
            mask_token_id=MASK_ID,
            output_type="seq",
        ).sequences[0]
        commit = threshold(sure) if sure < 1 else None
        [call] = b.submit(ask(f"{new} {text}", text, max_new_tokens=new, recompute=BLOCK, commit=commit))
        assert answer(b, call) == expected.tolist()
        saved += new - call.finished().forwards
    assert (saved > 0) == (sure < 1)


def test_llada2_gives_the_same_tokens_alone_and_in_a_batch(bench: Make, tmp_path: Path, glm_oracle: Any) -> None:
    model = endless(load(save_llada2(glm_oracle, tmp_path, block_size=4)))
    requests = mixed(4, (BLOCK, NONE), 8)
    expected = alone(model, requests)
    b = bench(model)
    for call in b.submit(*requests):
        assert outcome(b, call) == expected[call.request.id]
