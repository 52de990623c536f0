"""Constrained requests in the real engine, over models that babble: every answer obeys, whatever the policies."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from harness import Bench, Call
from helpers import ask, sure_above, tiny_model
from test_policies import COMMITS, RECOMPUTES, policy

from mmserve.constraint import admission
from mmserve.constraint.limits import PARSER_LIMITS
from mmserve.constraint.session import answer as answer_module
from mmserve.core.constraint import (
    Choice,
    ConstraintKind,
    ConstraintMode,
    ConstraintSampling,
    ConstraintSpec,
    JsonSchema,
    Regex,
)
from mmserve.core.events import Finished
from mmserve.core.request import Policy, Request
from mmserve.core.samples import sample_seed
from mmserve.errors import Cancelled, FailedPrecondition, InvalidArgument
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
LAST, BLOCK = policy("last"), policy("block")


def of(**properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    of(a=INTEGER, b={"type": "boolean"}),
    of(shape={"enum": ["circle", "square"]}, row=INTEGER),
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}},
    {"anyOf": [of(k={"const": "dot"}, at=INTEGER), of(k={"const": "box"}, w={"type": "number"})]},
    of(t={"type": "string", "minLength": 3, "maxLength": 8}),
    of(tags={"type": "array", "items": STRING, "minItems": 1, "maxItems": 2}),
    {"enum": ["a red circle", None, 17, [1, 2]]},
    of(day=dict(STRING, pattern="^[0-9]{4}-[0-9]{2}$")),
]


@pytest.fixture(scope="module")
def full() -> LoadedModel:
    """Everything a full-attention model may have beside it."""
    made = tiny_model(vision=False, seed=4)
    return dataclasses.replace(made, companion=like(made, Attention.CAUSAL), commit_filter=sure_above(0.3))


@pytest.fixture(scope="module")
def causal() -> LoadedModel:
    made = like(tiny_model(vision=False, seed=3), Attention.CAUSAL)
    return dataclasses.replace(made, companion=made)


@pytest.fixture(scope="module")
def block_causal() -> LoadedModel:
    return like(tiny_model(vision=False, seed=5), Attention.BLOCK_CAUSAL)


@pytest.fixture(scope="module")
def shifted_blocks(block_causal: LoadedModel) -> LoadedModel:
    """As Fast-dLLM v2: parts of blocks, whose first token comes from the block before."""
    spec = dataclasses.replace(block_causal.spec, logit_shift=1, default_block_length=8, sub_block=4)
    return dataclasses.replace(block_causal, spec=spec)


def like(model: LoadedModel, attention: Attention) -> LoadedModel:
    shift = int(attention is Attention.CAUSAL)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, attention=attention, logit_shift=shift))


def constrained(
    request: Request, kind: ConstraintKind | dict[str, Any], mode: ConstraintMode = ConstraintMode.STRICT
) -> Request:
    made = JsonSchema(json.dumps(kind)) if isinstance(kind, dict) else kind
    return dataclasses.replace(request, constraint=ConstraintSpec(made, mode))


def needed(bench: Bench, kind: ConstraintKind | dict[str, Any], recompute: Policy | None = None) -> int:
    """The least budget, as the refusal of a smaller one says it."""
    [call] = bench.submit(constrained(ask("small", max_new_tokens=1, recompute=recompute), kind))
    if isinstance(call.wait(), Finished):
        return 1
    error = call.error()
    assert isinstance(error, InvalidArgument), error
    assert [v.field for v in error.violations] == ["sampling.max_new_tokens"]
    found = re.search(r"at least (\d+) for", error.message)
    assert found, error.message
    return int(found[1])


def mixed(bench: Bench, pairs: Sequence[tuple[Policy, Policy]]) -> list[tuple[Request, dict[str, Any]]]:
    """A request for each pair of policies, with schemas in turn, and budgets from the least possible on."""
    rng = random.Random(0)
    least = [needed(bench, schema, pairs[0][0]) for schema in SCHEMAS]
    made = []
    for i, (recompute, commit) in enumerate(pairs):
        n = i % len(SCHEMAS)
        budget = least[n] + rng.choice((0, 0, 1, 3, 9, 24))
        request = ask(
            f"r{i}",
            "red " * (i % 3),
            max_new_tokens=budget,
            block=rng.choice((4, 8, 32)) if bench.engine.stages.model.spec.attention is Attention.FULL else 0,
            steps=rng.choice((0, budget // 4 or 1)),
            recompute=recompute,
            commit=commit,
            temperature=rng.choice((0.0, 0.8, 2.0)),
            seed=i,
            top_k=rng.choice((0, 5)),
        )
        made.append((constrained(request, SCHEMAS[n]), SCHEMAS[n]))
    return made


def check(call: Call, schema: dict[str, Any]) -> None:
    done = call.finished()
    assert done.reason == "end"
    assert done.usage.completion_tokens <= call.request.sampling.max_new_tokens
    value = json.loads(done.text, parse_float=Decimal)  # JSON's numbers have no largest one, Python's floats have
    assert jsonschema_rs.is_valid(schema, value), (schema, value)
    assert "".join(call.deltas) == done.text


def outcome(bench: Bench, call: Call) -> tuple[Any, ...]:
    done = call.finished()
    tokens, committed = bench.canvases.get(call.request.id, (np.zeros(0), np.zeros(0)))
    return done.text, done.reason, done.forwards, done.closed_by_budget, tokens.tolist(), committed.tolist()


def everything_obeys(bench: Bench, pairs: Sequence[tuple[Policy, Policy]], alone: int) -> list[Finished]:
    """All at once, then every so many of them alone, with the same outcome."""
    asked = mixed(bench, pairs)
    calls = bench.submit(*(request for request, _schema in asked))
    for call, (_request, schema) in zip(calls, asked, strict=True):
        check(call, schema)
    for call in calls[::alone]:
        [again] = bench.submit(dataclasses.replace(call.request, id=f"{call.request.id} alone"))
        again.wait()
        assert outcome(bench, again) == outcome(bench, call)
    bench.await_nothing_left()
    return [call.finished() for call in calls]


def pairs_of(recomputes: Sequence[Policy], commits: Sequence[Policy], every: int) -> list[tuple[Policy, Policy]]:
    """Each recompute policy with every so many of the commit policies, which take turns."""
    return [(one, other) for i, one in enumerate(recomputes) for j, other in enumerate(commits) if (i + j) % every == 0]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_policy_ends_in_valid_documents_within_the_budget(bench: Make, every: int) -> None:
    """All commit policies over all recompute policies, each pair or every third one, drawn or greedy."""
    pairs = pairs_of(RECOMPUTES, COMMITS, every)
    assert len(pairs) >= 90 // every
    everything_obeys(bench(), pairs, 12)


def test_policies_that_edit_close_or_listen(bench: Make, full: LoadedModel) -> None:
    recomputes = [policy("none"), policy("dkv_decode"), policy("dual"), policy("adaptive", response_refresh=3)]
    commits = [
        policy("edit", confidence=0.1, edit_confidence=0.1),
        policy("edit", confidence=0.3, edit_confidence=0.05),
        policy("learned"),
        policy("guided"),
        policy("guided", top_k=20, ratio=0.01),
        policy("early_commit", policy("learned"), early=0.9, middle=0.7, late=0.5),
        policy("threshold", confidence=0.2),
    ]
    done = everything_obeys(bench(full, watch=False), pairs_of(recomputes, commits, 2), 5)
    assert sum(d.edits for d in done) > 0, "a random model changes its mind, also within a schema"


@pytest.mark.parametrize("late", [0.0, 99.0])
def test_an_answer_region_is_judged_and_what_is_committed_obeys(bench: Make, late: float) -> None:
    """Early, all that is left goes at once; never, only the block and the region are looked at."""
    gaps = {"early": 99.0, "middle": 99.0, "late": late}
    commits = [policy("early_commit", **gaps, answer_start=at, answer_length=4) for at in (2, 30, 99)]
    recomputes = [policy("none"), policy("dkv_decode")]
    everything_obeys(bench(), list(itertools.product(recomputes, commits)), 2)


@pytest.mark.parametrize("kind", ["block_causal", "shifted_blocks"])
def test_block_diffusion(bench: Make, kind: str, request: pytest.FixtureRequest) -> None:
    commits = [policy("low_confidence"), policy("threshold", confidence=0.3), policy("random"), policy("entropy_bound")]
    recomputes = [BLOCK, policy("none"), policy("dual")]
    everything_obeys(bench(request.getfixturevalue(kind)), list(itertools.product(recomputes, commits)), 4)


def test_next_tokens(bench: Make, causal: LoadedModel) -> None:
    commits = [policy("low_confidence"), policy("ngram"), policy("draft_model"), policy("threshold", confidence=0.3)]
    done = everything_obeys(bench(causal), list(itertools.product([LAST, policy("none")], commits * 2)), 4)
    assert any(d.tokens_per_forward > 1 for d in done), "what is forced needs no pass of its own"


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_an_answer_may_be_longer_than_the_shortest(bench: Make, kind: str, request: pytest.FixtureRequest) -> None:
    """The end of a text that could go on is the model's to say, also where a block ends."""
    b = bench(request.getfixturevalue(kind))
    recompute = LAST if kind == "causal" else None
    calls = b.submit(
        *(
            constrained(
                ask(f"s{seed}", max_new_tokens=20, block=0, recompute=recompute, temperature=1.5, seed=seed),
                Regex("[a-z ]{1,40}"),
            )
            for seed in range(8)
        )
    )
    texts = [call.finished().text for call in calls]
    assert all(re.fullmatch("[a-z ]{1,40}", text) for text in texts)
    assert len(set(texts)) > 4, "samples differ by seed"
    assert max(map(len, texts)) > 4


def test_a_choice_is_one_of_its_options(bench: Make, full: LoadedModel) -> None:
    options = ("left", "right", "to the left of it", "l")
    calls = bench(full).submit(
        *(
            constrained(ask(f"c{seed}", max_new_tokens=24, temperature=3.0, seed=seed), Choice(options))
            for seed in range(12)
        )
    )
    assert {call.finished().text for call in calls} <= set(options)
    assert len({call.finished().text for call in calls}) > 1


def test_samples_stop_strings_snapshots_and_log_probabilities(bench: Make, full: LoadedModel) -> None:
    b = bench(full, watch=False)
    request = constrained(ask("n", max_new_tokens=30, n=3, temperature=1.0, snapshots=True), SCHEMAS[1])
    request = dataclasses.replace(request, streaming=dataclasses.replace(request.streaming, tokens=True))
    ended: list[Any] = []
    b.engine.submit(request, ended.append)
    b.await_nothing_left()
    done = [e for e in ended if isinstance(e, Finished)]
    assert sorted(e.sample for e in done) == [0, 1, 2]
    for each in done:
        assert jsonschema_rs.is_valid(SCHEMAS[1], json.loads(each.text))
        assert "".join(t.text for t in each.tokens) == each.text
        assert all(t.log_probability <= 0 and np.isfinite(t.log_probability) for t in each.tokens)
    [call] = b.submit(constrained(ask("stopped", max_new_tokens=30, stop=('"row"',)), SCHEMAS[1]))
    stopped = call.finished()
    assert stopped.reason == "stop" and stopped.text.startswith('{"shape":') and '"row"' not in stopped.text


def test_samples_do_not_spend_each_others_parsers(
    bench: Make, full: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a parser's lexer may learn is bounded: each sample answers as it does alone, with the seed that it has."""
    monkeypatch.setattr(admission, "PARSER_LIMITS", {**PARSER_LIMITS, "max_lexer_states": 400})
    kind = Regex("[abc]{3,9}[ab]{4}|[a-z]*a[a-z]{9}")
    request = constrained(ask("n", max_new_tokens=40, temperature=3.0, n=8, seed=5), kind)
    together, alone = bench(full, watch=False), bench(full, watch=False)
    ended: list[Any] = []
    together.engine.submit(request, ended.append)
    together.await_nothing_left()
    texts = {e.sample: e.text for e in ended if isinstance(e, Finished)}
    assert len(set(texts.values())) == 8
    for i in (0, 1):
        one = dataclasses.replace(request.sampling, n=1, seed=sample_seed(5, i))
        [call] = alone.submit(dataclasses.replace(request, id=f"alone {i}", sampling=one))
        assert call.finished().text == texts[i]


def test_a_budget_that_cuts_says_so(bench: Make, causal: LoadedModel) -> None:
    """What the model would make longer is ended in time."""
    b = bench(causal)
    long = {"type": "array", "items": INTEGER, "minItems": 6}
    least = needed(b, long, LAST)
    calls = b.submit(
        *(
            constrained(ask(f"b{s}", max_new_tokens=least + 1, recompute=LAST, temperature=4.0, seed=s), long)
            for s in range(6)
        )
    )
    for call in calls:
        check(call, long)
    assert any(call.finished().closed_by_budget for call in calls)


def test_a_parser_that_fails_leaves_the_witness(
    bench: Make, full: LoadedModel, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As native code's panics are."""

    improve, left = answer_module.improve, [3]

    def failing(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Panic
        return improve(*args, **options)

    monkeypatch.setattr(answer_module, "improve", failing)
    for model, recompute in ((full, None), (causal, LAST)):
        left[0] = 3
        b = bench(model)
        [call] = b.submit(constrained(ask("p", max_new_tokens=40, recompute=recompute), SCHEMAS[0]))
        check(call, SCHEMAS[0])
        assert left[0] == -1, "once it has failed it is not asked again"
        assert b.engine.stats().constraint_fallbacks > 0


def test_what_a_constraint_takes_is_told_and_counted(
    bench: Make, full: LoadedModel, causal: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told with each answer, counted by the engine; a step that has no time left is a fallback of its own kind."""
    for model, recompute in ((full, None), (causal, LAST)):
        b = bench(model)
        asked = [ask(f"t{i}", max_new_tokens=40, recompute=recompute) for i in range(2)]
        done = [call.finished() for call in b.submit(constrained(asked[0], SCHEMAS[0]), asked[1])]
        took = done[0].constraint
        assert took is not None and done[1].constraint is None
        assert took.steps == len(took.step_ms) == done[0].forwards
        assert took.late == 0 and took.forward_seconds > 0 and min(took.step_ms) > 0
        assert took.search_seconds == pytest.approx(sum(took.step_ms) / 1000)
        stats = b.engine.stats()
        assert (stats.constraint_steps, stats.constraint_fallbacks, stats.constraint_late) == (
            took.steps,
            took.fallbacks,
            0,
        )
    monkeypatch.setattr(answer_module, "SECONDS", 0.0)
    b = bench(full)
    [call] = b.submit(constrained(ask("late", max_new_tokens=40), SCHEMAS[0]))
    check(call, SCHEMAS[0])
    late = call.finished().constraint
    assert late is not None and 0 < late.late == late.fallbacks
    assert b.engine.stats().constraint_late == late.late


def test_validate_checks_the_answer_and_lenient_warns(bench: Make, full: LoadedModel) -> None:
    b = bench(full)
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}
    schema |= {"contains": {"const": 2}, "minContains": 2}
    outcomes = []
    for seed in range(6):
        request = ask(f"v{seed}", max_new_tokens=12, temperature=2.0, seed=seed)
        [call] = b.submit(constrained(request, schema, ConstraintMode.VALIDATE))
        ended = call.wait()
        if isinstance(ended, Finished):
            assert jsonschema_rs.is_valid(schema, json.loads(ended.text))
            assert any("contains" in warning for warning in ended.warnings)
        else:
            assert isinstance(call.error(), FailedPrecondition) and "minContains" in call.error().message
        outcomes.append(isinstance(ended, Finished))
    assert len(outcomes) == 6
    [call] = b.submit(constrained(ask("l", max_new_tokens=12), schema, ConstraintMode.LENIENT))
    assert any("contains" in warning for warning in call.finished().warnings)


def test_what_cannot_be_enforced_is_refused_with_its_place(bench: Make, full: LoadedModel) -> None:
    [call] = bench(full).submit(constrained(ask("x"), of(a={"type": "array", "uniqueItems": True})))
    error = call.error()
    assert isinstance(error, InvalidArgument)
    assert error.violations[0].field == "constraint.json_schema#/properties/a/uniqueItems"


@pytest.mark.parametrize("held", [True, False])
def test_a_request_can_be_cancelled_while_its_constraint_is_made_ready(
    bench: Make, full: LoadedModel, held: bool
) -> None:
    """By the worker that holds it, or waiting behind another; the next request is answered."""
    b = bench(full, watch=False)
    gate = b.gate("constrain")
    [first] = b.submit(constrained(ask("first", max_new_tokens=8), Regex("a+")))
    gate.wait()
    [second] = b.submit(constrained(ask("second", max_new_tokens=8), Regex("a+")))
    cancelled, other = (first, second) if held else (second, first)
    b.engine.cancel(cancelled.request.id)
    assert isinstance(cancelled.error(), Cancelled)
    gate.open()
    assert re.fullmatch("a+", other.finished().text)
    b.await_nothing_left()


@pytest.mark.parametrize("kind", ["causal", "block_causal", "shifted_blocks"])
@pytest.mark.parametrize("sampling", [ConstraintSampling.AWRS, ConstraintSampling.ASAP])
def test_sampling_true_to_the_model(
    bench: Make, kind: str, sampling: ConstraintSampling, request: pytest.FixtureRequest
) -> None:
    """Every schema, with budgets from the least on: valid, weighted, and the same alone and beside others.

    Block diffusion fills its blocks a position at a time.
    """
    b, asked = bench(request.getfixturevalue(kind), watch=False), []
    recompute, commits = (LAST, ("low_confidence", "ngram")) if kind == "causal" else (BLOCK, ("low_confidence",) * 2)
    for i, schema in enumerate(SCHEMAS):
        one = ask(
            f"r{i}",
            max_new_tokens=needed(b, schema, recompute) + (0, 2, 20)[i % 3],
            block=1,
            recompute=recompute,
            commit=policy(commits[i % 2]),
            temperature=(0.7, 1.5)[i % 2],
            seed=i,
        )
        spec = dataclasses.replace(constrained(one, schema).constraint, sampling=sampling)
        asked.append(dataclasses.replace(one, constraint=spec))
    calls = b.submit(*asked)
    for call, schema in zip(calls, SCHEMAS, strict=True):
        check(call, schema)
        assert call.finished().log_weight is not None and call.finished().log_weight < 0
    assert sum(call.finished().log_weight > -math.inf for call in calls) >= 6
    [again] = b.submit(dataclasses.replace(asked[2], id="again"))
    assert outcome(b, again) == outcome(b, calls[2])
    assert again.finished().log_weight == calls[2].finished().log_weight
    b.await_nothing_left()


def test_samples_that_learn_come_one_after_another(bench: Make, causal: LoadedModel) -> None:
    """In turn, whatever the batch has room for; and all of them are cancelled together."""
    b = bench(causal)
    request = constrained(ask("n", max_new_tokens=12, recompute=LAST, temperature=1.0, n=3), SCHEMAS[1])
    spec = dataclasses.replace(request.constraint, sampling=ConstraintSampling.ASAP)
    events: list[Any] = []
    budget = needed(b, SCHEMAS[1], LAST) + 4
    request = dataclasses.replace(
        request, constraint=spec, sampling=dataclasses.replace(request.sampling, max_new_tokens=budget)
    )
    b.batches.clear()
    b.engine.submit(request, events.append)
    b.await_nothing_left()
    assert [e.sample for e in events if isinstance(e, Finished)] == [0, 1, 2]
    assert {len(batch) for batch in b.batches} == {1}
    gate = b.gate("decode", lambda ids: "later.1" in ids)
    b.engine.submit(dataclasses.replace(request, id="later"), events.append)
    gate.wait()
    b.engine.cancel("later")
    gate.open()
    b.await_nothing_left()
    assert isinstance(events[-1].error, Cancelled)
