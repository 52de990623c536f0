"""Every policy from the SDK to core, by name and by class, and a real model's tokens over the wire."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from echo_server import EchoEngine, model_info, threaded
from helpers import ask, sure_above

from mmserve.client import (
    AsyncClient,
    Client,
    Confident,
    DkvDecode,
    DkvGreedy,
    DraftModel,
    EarlyCommit,
    EntropyBound,
    Factor,
    Finished,
    Guided,
    Learned,
    Ngram,
    Scheduler,
    Threshold,
)
from mmserve.config import EngineConfig, MediaConfig, resolve
from mmserve.core.request import Policy
from mmserve.decode.policies import Offered, commit_policy, recompute_policy
from mmserve.engine.engine import Engine
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel

RECOMPUTES = ("none", "prefix", "dual", "dkv_decode", "dkv_greedy", "free_cache")
COMMITS = ("low_confidence", "random", "threshold", "factor", "confident", "entropy_bound", "early_commit", "learned")
WITH_COMPANION = ("guided", "draft_model")
FILTER = sure_above(0.4)
OFFERED = Offered(commit_filter=FILTER)


@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[EchoEngine, Client]]:
    """An engine that says what request came to it."""
    engine = EchoEngine(model_info(recompute_policies=RECOMPUTES, commit_policies=(*COMMITS, *WITH_COMPANION)))
    with threaded(engine) as address, Client(address) as client:
        yield engine, client


@pytest.fixture(scope="module")
def address(model: LoadedModel) -> Iterator[str]:
    filtered = dataclasses.replace(model, commit_filter=FILTER)
    engine = Engine(filtered, resolve(EngineConfig(max_tokens=128, torch_threads=1, page_size=8)), MediaConfig())
    with threaded({"tiny": engine}) as found:  # type: ignore[dict-item]
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    with Client(address) as found:
        yield found


def policy(name: str, base: Policy | None = None, **options: float | str) -> Policy:
    return Policy(name=name, options=options, base=base)


EARLY = {"early": 7.5, "middle": 5.0, "late": 2.5, "mistakes": 0.0, "answer_start": 0, "answer_length": 0}
NAMED = [policy(name) for name in RECOMPUTES]
RECOMPUTE_CLASSES = [
    (DkvDecode(), policy("dkv_decode", refresh=8)),
    (DkvDecode(1), policy("dkv_decode", refresh=1)),
    (DkvGreedy(), policy("dkv_greedy", refresh=2, window=4)),
    (DkvGreedy(refresh=3, window=0), policy("dkv_greedy", refresh=3, window=0)),
]
COMMIT_CLASSES = [
    (Threshold(), policy("threshold", confidence=0.9)),
    (Threshold(2.0), policy("threshold", confidence=2.0)),
    (Factor(), policy("factor", factor=1.0)),
    (Factor(0.25), policy("factor", factor=0.25)),
    (Confident(), policy("confident", confidence=0.95)),
    (Confident(1.0), policy("confident", confidence=1.0)),
    (EntropyBound(), policy("entropy_bound", bound=0.1)),
    (EntropyBound(0.0), policy("entropy_bound", bound=0.0)),
    (Learned(), policy("learned", threshold=0.96, end_of_text=True)),
    (Learned(1.5, end_of_text=False), policy("learned", threshold=1.5, end_of_text=False)),
]
EARLY_CLASSES = [
    (EarlyCommit(), policy("early_commit", **EARLY)),
    (
        EarlyCommit(early=math.inf, late=-math.inf, answer_start=7, answer_length=3),
        policy(
            "early_commit", **{**EARLY, "early": math.inf, "late": -math.inf, "answer_start": 7, "answer_length": 3}
        ),
    ),
    (
        EarlyCommit(answer_after="Answer:\n", answer_length=3, base="threshold"),
        policy("early_commit", policy("threshold"), **{**EARLY, "answer_length": 3, "answer_after": "Answer:\n"}),
    ),
    (EarlyCommit(mistakes=0.25), policy("early_commit", **{**EARLY, "mistakes": 0.25})),
    *((EarlyCommit(base=made), policy("early_commit", core, **EARLY)) for made, core in COMMIT_CLASSES),
    *(
        (EarlyCommit(base=name), policy("early_commit", policy(name), **EARLY))  # type: ignore[arg-type]
        for name in COMMITS
        if name != "early_commit"
    ),
]
COMPANION_CLASSES = [
    *((name, policy(name)) for name in WITH_COMPANION),
    (Guided(), policy("guided", top_k=0, ratio=0.5)),
    (Guided(8, 0.0), policy("guided", top_k=8, ratio=0.0)),
    (DraftModel(), policy("draft_model", length=4)),
    (DraftModel(64), policy("draft_model", length=64)),
]


@pytest.mark.parametrize(
    ("given", "core"), [*((p.name, p) for p in NAMED), *RECOMPUTE_CLASSES], ids=lambda x: getattr(x, "name", str(x))
)
def test_recompute_policies_reach_core(echo: tuple[EchoEngine, Client], given: Any, core: Policy) -> None:
    engine, client = echo
    client.generate("x", recompute=given)
    request = engine.requests[-1]
    assert request.diffusion.recompute == core
    assert request.diffusion.commit == Policy(name="low_confidence")
    recompute_policy(request)


@pytest.mark.parametrize(
    ("given", "core"),
    [*((name, policy(name)) for name in COMMITS), *COMMIT_CLASSES, *EARLY_CLASSES, *COMPANION_CLASSES],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_commit_policies_reach_core(echo: tuple[EchoEngine, Client], given: Any, core: Policy) -> None:
    engine, client = echo
    client.generate("x", commit=given)
    request = engine.requests[-1]
    assert request.diffusion.commit == core
    assert request.diffusion.recompute == Policy(name="none")
    commit_policy(request, OFFERED)


def test_a_schedulers_name_reaches_core() -> None:
    engine = EchoEngine(model_info(recompute_policies=RECOMPUTES, commit_policies=(*COMMITS, "scheduler")))
    with threaded(engine) as address, Client(address) as client:
        client.generate("x", commit=Scheduler("refine"))
    assert engine.requests[-1].diffusion.commit == Policy(name="scheduler", options={"name": "refine"})


def test_the_classes_have_the_defaults_of_the_policies_they_name() -> None:
    for given, core in [*RECOMPUTE_CLASSES, *COMMIT_CLASSES, *EARLY_CLASSES, *COMPANION_CLASSES]:
        if given in (DkvDecode(), DkvGreedy()):
            plain = ask("x", recompute=policy(core.name)), ask("x", recompute=core)
            assert recompute_policy(plain[0]) == recompute_policy(plain[1])
        elif given in (
            Threshold(),
            Factor(),
            Confident(),
            EntropyBound(),
            Learned(),
            EarlyCommit(),
            Guided(),
            DraftModel(),
        ):
            plain = ask("x", commit=policy(core.name)), ask("x", commit=core)
            assert commit_policy(plain[0], OFFERED) == commit_policy(plain[1], OFFERED)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"recompute": "sometimes"}, "diffusion.recompute"),
        ({"recompute": ""}, "diffusion.recompute"),
        ({"recompute": Threshold(0.5)}, "diffusion.recompute"),
        ({"recompute": DkvGreedy(window=-1)}, "diffusion.dkv_greedy.window"),
        ({"recompute": DkvGreedy(refresh=2**32)}, "diffusion.dkv_greedy.refresh"),
        ({"commit": "never"}, "diffusion.commit"),
        ({"commit": DkvDecode(2)}, "diffusion.commit"),
        ({"commit": Threshold("high")}, "diffusion.threshold.confidence"),
        ({"commit": Learned("high")}, "diffusion.learned.threshold"),
        ({"commit": Learned(end_of_text="maybe")}, "diffusion.learned.end_of_text"),
        ({"commit": EarlyCommit(answer_start=-1)}, "diffusion.early_commit.answer_start"),
        ({"commit": EarlyCommit(answer_after=3)}, "diffusion.early_commit.answer_after"),
        ({"commit": EarlyCommit(base="never")}, "diffusion.early_commit.base"),
        ({"commit": EarlyCommit(base="early_commit")}, "diffusion.early_commit.base"),
        ({"commit": EarlyCommit(base=EarlyCommit())}, "diffusion.early_commit.base"),
        ({"commit": EarlyCommit(base=Ngram())}, "diffusion.early_commit.base"),
        ({"commit": EarlyCommit(base="guided")}, "diffusion.early_commit.base"),
        ({"commit": Guided(-1)}, "diffusion.guided.top_k"),
        ({"commit": DraftModel("x")}, "diffusion.draft_model.length"),
        ({"commit": EarlyCommit(base=Factor("x"))}, "diffusion.early_commit.factor.factor"),
        ({"min_p": "low"}, "sampling.min_p"),
        ({"repetition_penalty": "low"}, "sampling.repetition_penalty"),
    ],
)
def test_policies_that_cannot_be_sent(echo: tuple[EchoEngine, Client], arguments: dict[str, Any], field: str) -> None:
    _engine, client = echo
    with pytest.raises(InvalidArgument) as caught:
        client.generate("x", **arguments)
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"recompute": DkvGreedy(0)}, ["diffusion.dkv_greedy.refresh"]),
        ({"recompute": DkvDecode(0)}, ["diffusion.dkv_decode.refresh"]),
        ({"commit": Threshold(0.0)}, ["diffusion.threshold.confidence"]),
        ({"commit": Threshold(math.inf)}, ["diffusion.threshold.confidence"]),
        ({"commit": Factor(math.nan)}, ["diffusion.factor.factor"]),
        ({"commit": Confident(1.5)}, ["diffusion.confident.confidence"]),
        ({"commit": Guided(ratio=math.nan)}, ["diffusion.guided.ratio"]),
        ({"commit": DraftModel(0)}, ["diffusion.draft_model.length"]),
        ({"commit": EntropyBound(-0.1)}, ["diffusion.entropy_bound.bound"]),
        ({"commit": Learned(0.0)}, ["diffusion.learned.threshold"]),
        ({"commit": EarlyCommit(base=Learned(math.nan))}, ["diffusion.early_commit.learned.threshold"]),
        ({"commit": EarlyCommit(base=Threshold(-1.0))}, ["diffusion.early_commit.threshold.confidence"]),
        (
            {
                "recompute": DkvGreedy(0, 0),
                "commit": EarlyCommit(middle=math.nan, base=Confident(math.nan)),
                "min_p": -0.5,
                "repetition_penalty": math.inf,
                "steps": 0,
            },
            [
                "sampling.min_p",
                "sampling.repetition_penalty",
                "diffusion.steps",
                "diffusion.dkv_greedy.refresh",
                "diffusion.early_commit.middle",
                "diffusion.early_commit.confident.confidence",
            ],
        ),
    ],
)
def test_wrong_numbers_are_violations_all_at_once(client: Client, arguments: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.generate("x", max_new_tokens=4, **arguments)
    assert [v.field for v in caught.value.violations] == fields


# --- a real model ---


def test_the_server_says_which_policies_it_has(client: Client) -> None:
    info = client.describe("tiny")
    assert set(info.recompute_policies) >= set(RECOMPUTES)
    assert set(info.commit_policies) >= set(COMMITS)
    assert (info.recompute_policies[0], info.recompute_policy, info.commit_policy) == ("none", "dual", "threshold")
    assert not {"last", "ngram"} & {*info.recompute_policies, *info.commit_policies}, "those are for next-token models"


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_policies_by_name_answer(client: Client, recompute: Any) -> None:
    for commit in COMMITS:
        result = client.generate("a circle", recompute=recompute, commit=commit, max_new_tokens=7, block_length=4)  # type: ignore[arg-type]
        assert 1 <= result.forwards <= 7
        assert result.tokens == ()


def test_tokens_come_with_their_log_probabilities(client: Client, address: str, model: LoadedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "block_length": 5, "commit": Threshold(0.3), "temperature": 0.7}
    result = client.generate("a circle", tokens=True, **options)
    plain = client.generate("a circle", **options)
    assert (plain.tokens, plain.text, plain.forwards) == ((), result.text, result.forwards)
    assert len(result.tokens) == result.usage.completion_tokens
    assert model.tokenizer.decode([t.id for t in result.tokens], skip_special_tokens=True) == result.text
    assert all(1 <= t.step <= result.forwards and t.log_probability <= 0 for t in result.tokens)
    assert len({t.step for t in result.tokens}) > 1
    done = list(client.stream("a circle", tokens=True, **options))[-1]
    assert isinstance(done, Finished) and done.tokens == result.tokens

    async def asked() -> Any:
        async with AsyncClient(address) as other:
            return await other.generate("a circle", tokens=True, **options)

    assert asyncio.run(asked()).tokens == result.tokens
