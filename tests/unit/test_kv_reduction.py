"""Reductions of K/V against each rule written out plainly: what each head holds after every step, and what is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ask, picture, tiny_model
from plain_reduction import Plain, Rule, expected_attention, heavy_hitters, sink_window, visual_cache

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Policy, Request
from mmserve.decode.extensions.base import extension_of
from mmserve.decode.extensions.eviction import Eviction, KVEviction
from mmserve.decode.loop import DiffusionDecoder
from mmserve.decode.parts import Parts
from mmserve.decode.state import Decoding, Prefilling
from mmserve.encode.embedding import embedded
from mmserve.encode.encoder import Encoder
from mmserve.errors import InvalidArgument
from mmserve.kv.pool import pages_for
from mmserve.kv.reduction import REDUCTIONS, reduction_of
from mmserve.kv.reduction.base import Held
from mmserve.kv.reduction.heavy_hitters import HeavyHitters
from mmserve.kv.store import KVStore
from mmserve.kv.table import PageTable
from mmserve.models.base import Attention, LoadedModel

PAGE, NEW = 4, 24

CASES: dict[str, tuple[Policy, Rule, int]] = {
    "heavy_hitters": (
        Policy(name="heavy_hitters", options={"budget": 18}),
        heavy_hitters(18, 0.5, PAGE),
        0,
    ),
    "only heavy hitters": (
        Policy(name="heavy_hitters", options={"budget": 9, "recent": 0.0}),
        heavy_hitters(9, 0.0, PAGE),
        0,
    ),
    "sink_window": (
        Policy(name="sink_window", options={"budget": 13, "sinks": 2}),
        sink_window(13, 2, PAGE),
        10_000,
    ),
    "expected_attention": (
        Policy(name="expected_attention", options={"budget": 17, "sinks": 3, "future": 40}),
        expected_attention(17, 3, 40, PAGE),
        3,
    ),
    "visual_cache": (
        Policy(name="visual_cache", options={"budget": 3, "outputs": 5}),
        visual_cache(3, 5),
        -1,  # the prompt's last
    ),
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    made = tiny_model(vision=True)
    return dataclasses.replace(
        made, spec=dataclasses.replace(made.spec, attention=Attention.CAUSAL, logit_shift=1, end_ids=frozenset({-1}))
    )


@pytest.fixture(scope="module")
def asked(model: LoadedModel) -> tuple[Request, Encoded]:
    request = ask("r", images=(picture(1), picture(2)), max_new_tokens=NEW, recompute=Policy(name="last"))
    return request, Encoder(model, MediaConfig(), max_tokens=200).encode([request])[0]


def served(decoder: DiffusionDecoder, request: Request, encoded: Encoded) -> Decoding:
    """The state of decode, its first tokens not yet chosen."""
    pages = pages_for(len(encoded.ids) + NEW, PAGE)
    begun: Prefilling = decoder.begin(request, encoded, PageTable(tuple(range(40 - pages, 40))))
    while (prefilled := decoder.prefill([(request, begun)])[0]) is None:
        pass
    return decoder.open(request, prefilled)


def decoder_of(model: LoadedModel, kept: KVStore, **options: int) -> DiffusionDecoder:
    return DiffusionDecoder(Parts.of(model, kept, [KVEviction(model, kept)], **options))


def store(model: LoadedModel) -> KVStore:
    return KVStore(model.decoder.config, pages=40, page_size=PAGE, dtype=model.dtype, device=model.device)


@pytest.mark.parametrize("chunk", [0, 8])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_each_head_holds_what_the_rule_says(
    model: LoadedModel, asked: tuple[Request, Encoded], case: str, chunk: int
) -> None:
    policy, rule, first = CASES[case]
    request, encoded = asked
    size = len(encoded.ids)
    plain = Plain(model, rule, prompt=size, first_query=first if first >= 0 else size + first)
    visual = np.isin(np.arange(size), encoded.image_rows).tolist()
    for x, seen in zip(embedded(model, encoded.ids, encoded)[0], visual, strict=True):
        token = plain.run(x, seen)
    decoder = decoder_of(model, store(model), chunk=chunk)
    d = served(decoder, dataclasses.replace(request, kv_reduction=policy), encoded)
    most, fewest = 0, 10_000
    for step in range(NEW):
        decoder.propose([d])
        stepped = decoder.commit(d)
        assert d.canvas.tokens[size + step] == token, f"token {step}"
        if step == NEW - 1:
            break
        plain.reduce()
        eviction = extension_of(d.extensions, Eviction)
        assert eviction is not None
        assert [notes.positions(d.held).tolist() for notes in eviction.state.layers] == plain.kept, f"step {step}"
        assert stepped.pages in (None, len(d.prefilled.pages))
        token = plain.run(model.decoder.embed(torch.tensor(token)))
        most, fewest = max(most, d.held), min(fewest, d.held)
    reduced = policy.options["budget"] + PAGE if "visual" not in case else size + NEW - (8 - 3)
    assert most < reduced + 1 and d.held + eviction.evicted == size + NEW - 1 and eviction.evicted > 4
    assert len(d.prefilled.pages) == pages_for(int(reduced), PAGE)
    assert "visual" in case or fewest == policy.options["budget"]


@torch.inference_mode()
def test_heads_and_layers_choose_for_themselves(model: LoadedModel, asked: tuple[Request, Encoded]) -> None:
    request, encoded = asked
    decoder = decoder_of(model, store(model))
    policy = Policy(name="heavy_hitters", options={"budget": 9, "recent": 0.0})
    d = served(decoder, dataclasses.replace(request, kv_reduction=policy), encoded)
    decoder.commit(d)
    eviction = extension_of(d.extensions, Eviction)
    assert eviction is not None
    kept = [tuple(head) for notes in eviction.state.layers for head in notes.positions(d.held).tolist()]
    assert len(set(kept)) == 4


@pytest.mark.parametrize("name", REDUCTIONS)
@torch.inference_mode()
def test_a_budget_that_holds_everything_changes_no_bit(
    model: LoadedModel, asked: tuple[Request, Encoded], name: str
) -> None:
    request, encoded = asked
    stores = [store(model), store(model)]
    policies = [None, Policy(name=name, options={"budget": len(encoded.ids) + NEW})]
    found = []
    for policy, kept in zip(policies, stores, strict=True):
        for tensor in (*kept.keys, *kept.values):
            tensor.fill_(7.0)
        decoder = decoder_of(model, kept)
        d = served(decoder, dataclasses.replace(request, kv_reduction=policy), encoded)
        for _ in range(NEW):
            decoder.propose([d])
            assert decoder.commit(d).pages is None
        found.append((d.canvas.tokens.tolist(), d.log_probabilities.tobytes(), d.held))
    assert found[0] == found[1]
    for first, second in zip((*stores[0].keys, *stores[0].values), (*stores[1].keys, *stores[1].values), strict=True):
        assert torch.equal(first, second)


def test_a_budget_is_kept_to_within_a_page() -> None:
    policy = HeavyHitters(budget=12)
    for held in range(1, 40):
        now = Held(held, 0, 0, 0, PAGE)
        target = policy.target(now)
        assert target == (12 if held >= 12 + PAGE else held)
        assert policy.most(dataclasses.replace(now, positions=target), 100) == 12 + PAGE
        assert policy.most(dataclasses.replace(now, positions=target), 1) == min(target + 1, 12 + PAGE)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(name="x"), "there is no policy 'x'"),
        (Policy(name="heavy_hitters"), "budget must be at least 1, not 0"),
        (Policy(name="sink_window", options={"budget": 4}), "budget must be at least 5, not 4"),
        (Policy(name="expected_attention", options={"budget": 3, "sinks": 3}), "budget must be at least 4, not 3"),
        (Policy(name="visual_cache", options={"budget": 1, "recent": 1}), "recent"),
    ],
)
def test_wrong_numbers_are_refused(policy: Policy, message: str) -> None:
    request: Any = dataclasses.replace(ask("r"), kv_reduction=policy)
    with pytest.raises(InvalidArgument, match=message):
        reduction_of(request)
