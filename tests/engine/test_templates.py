"""Templates in the real engine, over models that babble: texts stay as they are, and each hole's constraint is kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import pytest
from grammars import grammar
from harness import Bench, Call
from helpers import ask, sure_above, tiny_model
from test_constrained import SCHEMAS, like, outcome, pairs_of
from test_policies import COMMITS, RECOMPUTES, policy

from mmserve.constraint import admission
from mmserve.constraint.compile.service import Grammars
from mmserve.core.canvas import MASKED
from mmserve.core.constraint import (
    Choice,
    ConstraintMode,
    ConstraintSpec,
    Gbnf,
    Hole,
    JsonSchema,
    Lark,
    Regex,
    Template,
)
from mmserve.core.events import Finished
from mmserve.core.request import Policy, Request
from mmserve.errors import FailedPrecondition, InvalidArgument
from mmserve.models.base import Attention, LoadedModel

Make = Callable[..., Bench]
Valid = Callable[[str], bool]


def matches(pattern: str) -> Valid:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def under(schema: dict[str, Any]) -> Valid:
    return lambda text: jsonschema_rs.is_valid(schema, json.loads(text))


#: Kinds of holes, and what may fill them, said without the server's grammars.
HOLES: list[tuple[Any, Valid]] = [
    (None, lambda text: True),
    (Regex("[a-z]{1,12}"), matches("[a-z]{1,12}")),
    (Regex("[0-9]+"), matches("[0-9]+")),
    (Choice(("red", "a small circle", "no")), lambda text: text in ("red", "a small circle", "no")),
    (JsonSchema(json.dumps(SCHEMAS[0])), under(SCHEMAS[0])),
    (JsonSchema('{"type": "integer"}'), matches("-?(0|[1-9][0-9]*)")),
    (Lark('start: "(" start? ")"'), lambda text: text == "(" * (len(text) // 2) + ")" * (len(text) // 2) != ""),
    (Gbnf('root ::= [xy]+ "!"'), matches("[xy]+!")),
]
TEXTS = ("Name: ", "\n", ", and the shape is ", " — ", '{"a":', "é", "\n\nIt is left of ")


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    made = tiny_model(vision=False, seed=4)
    causal = like(tiny_model(vision=False, seed=3), Attention.CAUSAL)
    full = dataclasses.replace(made, companion=like(made, Attention.CAUSAL), commit_filter=sure_above(0.3))
    shifted = dataclasses.replace(made, spec=dataclasses.replace(made.spec, logit_shift=1))
    blocks = like(tiny_model(vision=False, seed=5), Attention.BLOCK_CAUSAL)
    return {"full": full, "shifted": shifted, "blocks": blocks, "causal": causal}


def templated(request: Request, *parts: str | Hole) -> Request:
    return dataclasses.replace(request, constraint=ConstraintSpec(Template(parts)))


def drawn(rng: random.Random) -> tuple[tuple[str | Hole, ...], tuple[Valid, ...]]:
    """A random template, and what may fill its holes."""
    parts, valid = list[str | Hole](), list[Valid]()
    for i in range(rng.randint(1, 2)):
        if i or rng.random() < 0.7:
            parts.append(rng.choice(TEXTS))
        if rng.random() < 0.2 and parts:
            parts.append(rng.choice(TEXTS))
        kind, may = rng.choice(HOLES)
        parts.append(Hole(rng.randint(12, 14) if isinstance(kind, JsonSchema) else rng.randint(5, 9), kind))
        valid.append(may)
    if rng.random() < 0.7:
        parts.append(rng.choice(TEXTS))
    return tuple(parts), tuple(valid)


def check(call: Call, valid: Sequence[Valid]) -> None:
    assert call.request.constraint is not None
    template, done = call.request.constraint.kind, call.finished()
    assert isinstance(template, Template)
    holes = iter(done.holes)
    assert done.text == "".join(part if isinstance(part, str) else next(holes) for part in template.parts)
    assert len(done.holes) == len(valid)
    for text, may in zip(done.holes, valid, strict=True):
        assert may(text), (template, done.holes)
    assert done.reason == "end"
    assert "".join(call.deltas) == done.text
    assert done.usage.completion_tokens <= call.request.sampling.max_new_tokens


def mixed(bench: Bench, pairs: Sequence[tuple[Policy, Policy]]) -> list[tuple[Request, tuple[Valid, ...]]]:
    rng, made = random.Random(1), []
    spec = bench.engine.stages.model.spec
    for i, (recompute, commit) in enumerate(pairs):
        parts, valid = drawn(rng)
        request = ask(
            f"t{i}",
            "red " * (i % 3),
            max_new_tokens=72,
            block=rng.choice((4, 8, 32, 72)) if spec.attention is Attention.FULL else 0,
            steps=rng.choice((0, 18)),
            recompute=recompute,
            commit=commit,
            temperature=rng.choice((0.0, 0.8, 2.0)),
            seed=i,
        )
        made.append((templated(request, *parts), valid))
    return made


def everything_obeys(bench: Bench, pairs: Sequence[tuple[Policy, Policy]], alone: int) -> list[Finished]:
    """All at once, then every so many of them alone, with the same outcome."""
    asked = mixed(bench, pairs)
    calls = bench.submit(*(request for request, _valid in asked))
    for call, (_request, valid) in zip(calls, asked, strict=True):
        check(call, valid)
    for call in calls[::alone]:
        [again] = bench.submit(dataclasses.replace(call.request, id=f"{call.request.id} alone"))
        again.wait()
        assert outcome(bench, again) == outcome(bench, call)
        assert again.finished().holes == call.finished().holes
    bench.await_nothing_left()
    return [call.finished() for call in calls]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_policy_keeps_the_texts_and_fills_the_holes(bench: Make, every: int) -> None:
    everything_obeys(bench(), pairs_of(RECOMPUTES, COMMITS, every), 12)


def test_policies_that_edit_close_or_listen(bench: Make, models: dict[str, LoadedModel]) -> None:
    recomputes = [policy("none"), policy("dkv_decode"), policy("dual"), policy("adaptive", response_refresh=3)]
    commits = [
        policy("edit", confidence=0.1, edit_confidence=0.1),
        policy("edit", confidence=0.3, edit_confidence=0.05),
        policy("learned"),
        policy("guided"),
        policy("guided", top_k=20, ratio=0.01),
        policy("threshold", confidence=0.2),
    ]
    done = everything_obeys(bench(models["full"], watch=False), pairs_of(recomputes, commits, 2), 5)
    assert sum(d.edits for d in done) > 0


@pytest.mark.parametrize("kind", ["shifted", "blocks", "causal"])
def test_every_attention(bench: Make, models: dict[str, LoadedModel], kind: str) -> None:
    recompute = {"shifted": "prefix", "blocks": "block", "causal": "last"}[kind]
    commits = [policy("low_confidence"), policy("threshold", confidence=0.3)] * 3
    everything_obeys(bench(models[kind]), list(itertools.product([policy(recompute), policy("none")], commits)), 6)


def test_texts_stand_on_the_canvas_from_the_first_step(bench: Make, models: dict[str, LoadedModel]) -> None:
    b = bench(models["full"])
    parts = ("Name: ", Hole(6, Regex("[a-z]+")), "\nShape: ", Hole(4, Choice(("red", "small"))), "\n")
    request = ask("s", max_new_tokens=40, block=40, snapshots=True)
    [call] = b.submit(templated(request, *parts))
    check(call, (matches("[a-z]+"), lambda text: text in ("red", "small")))
    for snapshot in call.snapshots:
        assert re.fullmatch("Name: .*\nShape: .*\n", snapshot.text, re.DOTALL)
    assert "▒" in call.snapshots[0].text and call.snapshots[-1].text == call.finished().text
    _tokens, committed = b.canvases["s"]
    answer = committed[-40:]
    assert (answer != MASKED).all()
    assert (answer == 0).sum() >= 40 - 10, "all but the holes is there before the first pass"
    assert call.finished().forwards <= 10


def test_tokens_are_told_without_padding(bench: Make, models: dict[str, LoadedModel]) -> None:
    request = templated(ask("k", max_new_tokens=30), "red: ", Hole(9, Regex("[0-9]{2}")), " left", Hole(5))
    streaming = dataclasses.replace(request.streaming, tokens=True)
    [call] = bench(models["full"]).submit(dataclasses.replace(request, streaming=streaming))
    done = call.finished()
    assert "".join(token.text for token in done.tokens) == done.text
    assert len(done.tokens) == done.usage.completion_tokens


def test_what_does_not_fit_is_refused_with_its_place(bench: Make, models: dict[str, LoadedModel]) -> None:
    long = JsonSchema(json.dumps(SCHEMAS[0]))
    for kind in ("full", "causal"):
        b, recompute = bench(models[kind]), policy("last") if kind == "causal" else None
        ready = ask("x", max_new_tokens=24, recompute=recompute)
        refusals = {
            "constraint.template.parts[1].hole.max_tokens": ("a", Hole(2, long)),
            "constraint.template.parts[2].hole.constraint.regex": ("a", "b", Hole(2, Regex("(?=a)"))),
            "sampling.max_new_tokens": ("a" * 60, Hole(20, Regex("[0-9]{20}"))),
        }
        for i, (field, parts) in enumerate(refusals.items()):
            [call] = b.submit(templated(dataclasses.replace(ready, id=f"x{i}"), *parts))
            error = call.error()
            assert isinstance(error, InvalidArgument)
            assert [violation.field for violation in error.violations] == [field]
        needed = re.search(r"at least (\d+) ", error.message)
        assert needed and int(needed[1]) > 24
        enough = dataclasses.replace(ready.sampling, max_new_tokens=int(needed[1]))
        [call] = b.submit(templated(dataclasses.replace(ready, id="enough", sampling=enough), *parts))
        check(call, (matches("[0-9]{20}"),))


def test_the_grammars_of_all_holes_have_a_total(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = Hole(2, Regex("\\p{L}{1,2}"))
    most = 2 * len(grammar(letters.kind).text)
    monkeypatch.setattr(admission, "MAX_TEMPLATE_BYTES", most)
    made = bench(models["full"])
    [call] = made.submit(templated(ask("few", max_new_tokens=24), letters, "-", letters))
    check(call, (str.isalpha,) * 2)
    [call] = made.submit(templated(ask("more", max_new_tokens=24), *(letters, "-") * 3))
    error = call.error()
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == ["constraint.template.parts[4].hole.constraint"]
    assert f"larger than {most} bytes together" in error.message


def test_the_time_of_all_different_holes_has_a_total(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, seconds = Grammars.first, list[float]()

    def slow(grammars: Grammars, spec: ConstraintSpec, budget: int, cache: str) -> tuple[Any, Any, float]:
        grammar, found, took = first(grammars, spec, budget, cache)
        seconds.append(took)
        return grammar, found, 1.0

    monkeypatch.setattr(Grammars, "first", slow)
    monkeypatch.setattr(admission, "MAX_TEMPLATE_SECONDS", 1.5)
    digits, letters = Hole(2, Regex("[0-9]{2}")), Hole(2, Regex("[a-z]{2}"))
    made = bench(models["full"])
    [call] = made.submit(templated(ask("equal", max_new_tokens=24), digits, "-", digits))
    check(call, (str.isdigit,) * 2)
    [call] = made.submit(templated(ask("different", max_new_tokens=24), digits, "-", letters))
    error = call.error()
    assert isinstance(error, InvalidArgument) and "more than 1.5 s of processor time" in error.message
    assert [violation.field for violation in error.violations] == ["constraint.template.parts[2].hole.constraint"]
    assert min(seconds) > 0, "also of a grammar that is cached"


def test_a_hole_is_judged_in_the_mode_validate(bench: Make, models: dict[str, LoadedModel]) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    schema |= {"contains": {"const": 2}, "maxContains": 1}
    ended = []
    benches = {kind: bench(models[kind]) for kind in ("full", "causal")}
    for kind, seed in itertools.product(benches, range(4)):
        hole = Hole(8, JsonSchema(json.dumps(schema)), ConstraintMode.VALIDATE)
        recompute = policy("last") if kind == "causal" else None
        request = ask(f"v{kind}{seed}", max_new_tokens=30, temperature=3.0, seed=seed, recompute=recompute)
        [call] = benches[kind].submit(templated(request, "found: ", hole, "."))
        last = call.wait()
        if isinstance(last, Finished):
            assert jsonschema_rs.is_valid(schema, json.loads(last.holes[0]))
            assert any("contains" in warning for warning in last.warnings)
        else:
            assert isinstance(call.error(), FailedPrecondition)
        ended.append(last)
    assert len(ended) == 8


def test_a_stop_string_cuts_a_template(bench: Make, models: dict[str, LoadedModel]) -> None:
    request = ask("s", max_new_tokens=30, stop=("circle",))
    [call] = bench(models["full"]).submit(templated(request, "the circle is ", Hole(4)))
    done = call.finished()
    assert (done.reason, done.text, done.holes) == ("stop", "the ", ())
