"""Which policies a request gets that names none, one, or a quality, over a real socket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from echo_server import EchoEngine, model_info, threaded

from mmserve.client import Client, HeavyHitters, LegoLink, Measured, Pair, Threshold, Tuning
from mmserve.config import EngineConfig, MediaConfig, resolve
from mmserve.core.request import Policy
from mmserve.engine.engine import Engine
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc

PLAIN = Pair.named("none", "low_confidence")
DUAL = Pair(Policy(name="dual"), Policy(name="threshold", options={"confidence": 0.9}))
LOOSE = Pair(Policy(name="dual"), Policy(name="threshold", options={"confidence": 0.5}))
EDITS = Pair(Policy(name="dual"), Policy(name="edit"))
LAST = Pair.named("last", "low_confidence")
NGRAM = Pair(Policy(name="last"), Policy(name="ngram", options={"length": 8}))


def row(pair: Pair, quality: float, time_ratio: float) -> Measured:
    return Measured(
        pair=pair, quality=quality, accuracy=0.9, agreement=0.9, same=0.5, time_ratio=time_ratio, forwards=3.0
    )


CURVE = (row(PLAIN, 1.0, 1.0), row(DUAL, 0.995, 0.1), row(LOOSE, 0.975, 0.05))
TUNINGS = {
    "diffusion": Tuning(source="policy.json", plain=PLAIN, default=DUAL, curve=CURVE, measured={"prompts": 60}),
    "editing": Tuning(source="policy.json", plain=PLAIN, default=EDITS),
    "causal": Tuning(source="policy.json", plain=LAST, default=NGRAM),
}
POLICIES = {
    "recompute_policies": ("none", "dual", "dkv_decode", "last"),
    "commit_policies": ("low_confidence", "threshold", "random", "edit", "ngram"),
}


def engine_of(name: str) -> EchoEngine:
    tuning = TUNINGS[name]
    names = {"recompute_policy": tuning.default.recompute.name, "commit_policy": tuning.default.commit.name}
    blocks = {} if name != "causal" else {"diffusion": False, "block_length": 1}
    return EchoEngine(model_info(name, **POLICIES, **names, **blocks, tuning=tuning))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[dict[str, EchoEngine], Client]]:
    engines = {name: engine_of(name) for name in TUNINGS}
    with threaded(engines) as address, Client(address) as client:  # type: ignore[arg-type]
        yield engines, client


def pair_of(served: tuple[dict[str, EchoEngine], Client], model: str, **options: Any) -> Pair:
    """The policies with which a request came to its engine."""
    engines, client = served
    client.generate("x", model=model, **options)
    asked = engines[model].requests[-1].diffusion
    return Pair(asked.recompute, asked.commit)


def test_the_defaults_and_their_figures_are_described(served: tuple[dict[str, EchoEngine], Client]) -> None:
    _engines, client = served
    for name, tuning in TUNINGS.items():
        assert client.describe(name).tuning == tuning


@pytest.mark.parametrize(
    ("options", "pair"),
    [
        ({}, DUAL),
        ({"quality": "exact"}, PLAIN),
        ({"quality": "balanced"}, DUAL),
        ({"quality": "fast"}, LOOSE),
        ({"quality": 0.99}, DUAL),
        ({"quality": 1}, PLAIN),
        ({"quality": 0.97}, LOOSE),
        ({"recompute": "none"}, Pair(PLAIN.recompute, DUAL.commit)),
        ({"commit": "low_confidence"}, Pair(DUAL.recompute, PLAIN.commit)),
        ({"commit": Threshold(0.3)}, Pair(DUAL.recompute, Policy(name="threshold", options={"confidence": 0.3}))),
        ({"recompute": "dkv_decode", "commit": "random"}, Pair.named("dkv_decode", "random")),
        ({"block_length": 8}, DUAL),
        ({"steps": 4}, Pair(DUAL.recompute, PLAIN.commit)),
        ({"steps": 4, "quality": "exact"}, PLAIN),
        ({"steps": 4, "commit": "random"}, Pair(DUAL.recompute, Policy(name="random"))),
        ({"temperature": 0.7, "n": 3}, DUAL),
        ({"schema": {"type": "object"}}, DUAL),
        ({"regex": "a+", "temperature": 1.0, "constraint_sampling": "awrs"}, Pair(DUAL.recompute, PLAIN.commit)),
    ],
    ids=str,
)
def test_what_a_request_does_not_name_is_the_models(
    served: tuple[dict[str, EchoEngine], Client], options: dict[str, Any], pair: Pair
) -> None:
    assert pair_of(served, "diffusion", **options) == pair


@pytest.mark.parametrize(
    ("model", "options", "pair"),
    [
        ("editing", {}, EDITS),
        ("editing", {"repetition_penalty": 1.0}, EDITS),
        ("editing", {"repetition_penalty": 1.2}, Pair(EDITS.recompute, PLAIN.commit)),
        ("editing", {"image_reuse": LegoLink()}, EDITS),
        ("causal", {}, NGRAM),
        ("causal", {"quality": "exact"}, LAST),
        ("causal", {"repetition_penalty": 1.2}, LAST),
        ("causal", {"kv_reduction": HeavyHitters(8)}, LAST),
        ("causal", {"image_reuse": LegoLink()}, LAST),
        ("causal", {"steps": 3}, LAST),
    ],
    ids=str,
)
def test_a_default_that_leaves_no_room_for_the_rest_gives_way(
    served: tuple[dict[str, EchoEngine], Client], model: str, options: dict[str, Any], pair: Pair
) -> None:
    assert pair_of(served, model, **options) == pair


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"quality": "exact", "recompute": "none"}, "diffusion.quality"),
        ({"quality": 0.99, "commit": "threshold"}, "diffusion.min_quality"),
        ({"quality": 0.0}, "diffusion.min_quality"),
        ({"quality": 1.5}, "diffusion.min_quality"),
        ({"quality": float("nan")}, "diffusion.min_quality"),
        ({"quality": "best"}, "diffusion.quality"),
        ({"quality": True}, "diffusion.quality"),
        ({"quality": "fast", "steps": 4}, "diffusion.quality"),
        ({"quality": 0.9, "steps": 4}, "diffusion.min_quality"),
    ],
    ids=str,
)
def test_a_quality_that_cannot_be_is_invalid(
    served: tuple[dict[str, EchoEngine], Client], options: dict[str, Any], field: str
) -> None:
    _engines, client = served
    with pytest.raises(InvalidArgument) as raised:
        client.generate("x", model="diffusion", **options)
    assert [violation.field for violation in raised.value.violations] == [field]
    assert "QUALITY_" not in str(raised.value), "the SDK's users name it in lower case"


@pytest.mark.parametrize("number", [0, 4, 77])
def test_a_quality_without_a_name_is_invalid_over_the_wire(
    served: tuple[dict[str, EchoEngine], Client], number: int
) -> None:
    import grpc

    _engines, client = served
    chat = [pb.ChatMessage(role=pb.ROLE_USER, parts=[pb.ContentPart(text="x")])]
    message = pb.GenerateRequest(messages=chat, diffusion=pb.DiffusionParams(quality=number))  # type: ignore[arg-type]
    with grpc.insecure_channel(client.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(message))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "diffusion.quality" in raised.value.details()


# --- a real model ---


@pytest.fixture(scope="module")
def real(model: LoadedModel) -> Iterator[Client]:
    engine = Engine(model, resolve(EngineConfig(max_tokens=128, torch_threads=1, page_size=8)), MediaConfig())
    with threaded({"tiny": engine}) as address, Client(address) as client:  # type: ignore[dict-item]
        yield client


def test_the_default_is_the_fast_path_and_exact_is_plain_decoding(real: Client) -> None:
    found = real.describe().tuning
    assert found is not None and (found.source, found.plain, found.default) == ("literature", PLAIN, DUAL)
    given = {"max_new_tokens": 16}
    plain = real.generate("what is it?", recompute="none", commit="low_confidence", **given)
    exact = real.generate("what is it?", quality="exact", **given)
    assert (exact.text, exact.forwards, exact.recomputed_tokens) == (
        plain.text,
        plain.forwards,
        plain.recomputed_tokens,
    )
    named = real.generate("what is it?", recompute="dual", commit=Threshold(0.9), **given)
    default = real.generate("what is it?", **given)
    assert (default.text, default.recomputed_tokens) == (named.text, named.recomputed_tokens)
    assert default.recomputed_tokens < plain.recomputed_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "[ab]{1,9}"},
        {"choices": ["red", "blue"]},
        {"template": ["a: ", {"regex": "[0-9]", "max_tokens": 1}]},
        {"steps": 3},
        {"block_length": 5},
        {"temperature": 1.0, "n": 3, "seed": 5},
        {"repetition_penalty": 1.3},
        {"regex": "[ab]{1,4}", "temperature": 1.0, "constraint_sampling": "awrs", "block_length": 1},
        {"tokens": True, "stop": ["zq"]},
    ],
    ids=str,
)
def test_every_kind_of_request_is_answered_by_default(real: Client, options: dict[str, Any]) -> None:
    from mmserve.client import Hole

    if "template" in options:
        options = {"template": [Hole(**part) if isinstance(part, dict) else part for part in options["template"]]}
    result = real.generate("what is it?", max_new_tokens=12, **options)
    assert result.forwards >= 1
    if "steps" in options:
        assert result.forwards == 3, "as many passes as the schedule says"


def test_what_is_described_is_what_is_served(real: Client, model: LoadedModel) -> None:
    tuned = dataclasses.replace(model, spec=dataclasses.replace(model.spec, logit_shift=1))
    engine = Engine(tuned, resolve(EngineConfig(max_tokens=128, torch_threads=1, page_size=8)), MediaConfig())
    assert (engine.info.recompute_policy, engine.info.commit_policy) == ("prefix", "threshold")
