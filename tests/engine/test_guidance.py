"""Classifier-free guidance: LLaDA's rule token for token, under every cache, beside strangers, and its refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Bench
from helpers import ask, dkv, picture, tiny_model
from plain_decoding import plain_decoding
from test_commit_references import llada, low_confidence, reference, served
from test_constrained import SCHEMAS, check, constrained, needed
from test_masked_families import TEXTS, answer, outcome, prompt_of
from test_policies import RECOMPUTES, name_of, policy

from mmserve.core.request import Request
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]


def guided(request: Request, scale: float) -> Request:
    return dataclasses.replace(request, diffusion=dataclasses.replace(request.diffusion, cfg_scale=scale))


@pytest.fixture(scope="module")
def plain_model() -> LoadedModel:
    return tiny_model(vision=True)


@pytest.fixture(scope="module")
def shared(plain_model: LoadedModel) -> Iterator[Bench]:
    made = Bench(plain_model, stages="inline")
    yield made
    made.close()


def test_tokens_are_those_of_lladas_generate(bench: Make, tmp_path: Path) -> None:
    oracle = llada(0.5)
    b = bench(served(oracle, tmp_path), stages="inline")
    for text in TEXTS:
        prompt, found = prompt_of(b, text), set()
        for scale in (0.0, 0.7, 2.5):
            expected = reference(oracle, prompt, 18, 6, 9, low_confidence(6, 3), scale)
            request = guided(ask(f"{scale} {text}", text, max_new_tokens=18, block=6, steps=9), scale)
            [call] = b.submit(request)
            assert (answer(b, call), call.finished().forwards) == expected, (text, scale)
            assert call.finished().recomputed_tokens == 9 * (len(prompt) + 18) * (2 if scale else 1)
            found.add(tuple(expected[0]))
        assert len(found) > 1, "guidance decides something"


@pytest.mark.parametrize("recompute", RECOMPUTES, ids=name_of)
def test_a_cache_holds_keys_and_values_of_both_sequences(
    shared: Bench, plain_model: LoadedModel, recompute: Any
) -> None:
    """Against the plain decoder, which keeps two arrays of them; a picture in the prompt is masked with it."""
    for commit, images in ((policy("threshold", confidence=0.3), ()), (policy("low_confidence"), (picture(1),))):
        name = f"{name_of(recompute)} {commit.name}"
        asked = ask(
            name, f"{name}?", images=images, max_new_tokens=14, block=5, steps=9, recompute=recompute, commit=commit
        )
        request = guided(asked, 1.5)
        [encoded] = shared.engine.stages.encoder.encode([request])
        expected = plain_decoding(plain_model, encoded, request)
        [call] = shared.submit(request)
        done, (tokens, committed) = call.finished(), shared.canvases[name]
        assert tokens.tolist() == expected.tokens.tolist()
        assert committed.tolist() == expected.committed_at.tolist()
        assert done.recomputed_tokens == 2 * expected.recomputed
    shared.await_nothing_left()


def test_refresh_one_is_no_cache(shared: Bench) -> None:
    request = guided(ask("exact", max_new_tokens=12, block=6, recompute=policy("none")), 2.0)
    cached = dataclasses.replace(request.diffusion, recompute=dkv(1))
    other = dataclasses.replace(request, id="refreshed", diffusion=cached)
    assert outcome(shared, shared.submit(request)[0]) == outcome(shared, shared.submit(other)[0])


def strangers() -> list[Request]:
    return [
        guided(
            ask(
                f"r{i}",
                "red circle " * (i % 4) + f"{i}",
                max_new_tokens=(1, 7, 12, 21)[i % 4],
                block=(5, 0)[i % 2],
                recompute=RECOMPUTES[i % len(RECOMPUTES)],
                commit=policy("early_commit", early=0.9, middle=0.7, late=0.5, answer_length=1) if i % 3 == 1 else None,
                temperature=(0.0, 1.1)[i % 2],
                seed=i,
            ),
            (0.0, 0.5, 3.0)[i % 3],
        )
        for i in range(12)
    ]


@pytest.mark.parametrize("config", [{}, {"page_size": 1, "decode_tokens": 60}])
def test_an_answer_is_the_same_among_strangers(bench: Make, plain_model: LoadedModel, config: dict[str, int]) -> None:
    single: Bench = bench(plain_model, stages="inline")
    alone = {r.id: outcome(single, single.submit(r)[0]) for r in strangers()}
    b: Bench = bench(plain_model, **config)
    for tensor in (*b.engine.stages.store.keys, *b.engine.stages.store.values):
        tensor.fill_(torch.nan)
    for call in b.submit(*reversed(strangers())):
        assert outcome(b, call) == alone[call.request.id]
    b.await_nothing_left()


def test_a_constrained_answer_obeys(shared: Bench) -> None:
    texts = set()
    for n, schema in enumerate(SCHEMAS):
        for scale in (0.0, 2.0):
            request = ask(f"{n} {scale}", max_new_tokens=needed(shared, schema) + 9, block=8, recompute=policy("dual"))
            [call] = shared.submit(constrained(guided(request, scale), schema))
            check(call, schema)
            texts.add(call.finished().text)
    assert len(texts) > len(SCHEMAS), "guidance decides something"


def test_blocks_of_attention_are_guided_and_their_prompts_shared(bench: Make, plain_model: LoadedModel) -> None:
    """Block diffusion: the prompt's own pages come from the prefix cache, those of its masks are made."""
    spec = dataclasses.replace(plain_model.spec, attention=Attention.BLOCK_CAUSAL, default_block_length=4)
    b: Bench = bench(dataclasses.replace(plain_model, spec=spec), prefix_cache=True)
    request = guided(ask("first", "a red circle " * 8, max_new_tokens=12, recompute=policy("block")), 1.0)
    exact = dataclasses.replace(request.diffusion, recompute=policy("none"))
    first, again, plain = (
        b.ask(r)
        for r in (
            request,
            dataclasses.replace(request, id="again"),
            dataclasses.replace(request, id="plain", diffusion=exact),
        )
    )
    assert again.usage.cached_tokens > 0 == first.usage.cached_tokens
    assert first.text == again.text == plain.text


def test_what_cannot_be_guided_is_refused(bench: Make, plain_model: LoadedModel) -> None:
    b: Bench = bench(plain_model)
    for scale in (-0.1, 100.1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match=r"diffusion.cfg_scale: must be in \[0, 100\]"):
            b.submit(guided(ask("x"), scale))
    spec = dataclasses.replace(plain_model.spec, attention=Attention.CAUSAL, logit_shift=1)
    causal: Bench = bench(dataclasses.replace(plain_model, spec=spec))
    with pytest.raises(Unimplemented, match="needs masked diffusion"):
        causal.submit(guided(ask("x", recompute=policy("last")), 1.0))


def test_a_request_whose_two_sequences_never_fit_is_refused_and_others_go_on(
    bench: Make, plain_model: LoadedModel
) -> None:
    model = dataclasses.replace(plain_model, spec=dataclasses.replace(plain_model.spec, max_tokens=128))
    b: Bench = bench(model, page_size=8, pages=16, max_tokens=128)
    large, small = ask("large", "a" * 20, max_new_tokens=64), guided(ask("small", "a", max_new_tokens=4), 1.0)
    [refused, plain, fits] = b.submit(guided(large, 1.0), dataclasses.replace(large, id="plain"), small)
    assert isinstance(refused.error(), InvalidArgument)
    assert "need 24 K/V pages, and there are 16: leave out cfg_scale" in str(refused.error())
    assert plain.finished().text and fits.finished().forwards == 4
    b.await_nothing_left()
