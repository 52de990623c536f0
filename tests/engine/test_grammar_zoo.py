"""Grammars as people write them, in the real engine over models that babble: all are admitted, all answers parse.

Judges are Lark's own Earley parser, and ``gbnf_judge`` for GBNF. A few grammars are run by default; all of them, with
more answers each and on the bundled models, too, by ``pytest -m slow tests/engine/test_grammar_zoo.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import harness
import lark
import pytest
from gbnf_judge import Judge
from harness import Bench
from helpers import ask, tiny_model
from test_constrained import constrained, like

from mmserve.config import ModelConfig
from mmserve.core.constraint import ConstraintKind, Gbnf, Lark
from mmserve.core.request import Request
from mmserve.models.base import Attention, LoadedModel
from mmserve.models.registry import load_model

Make = Callable[..., Bench]
ZOO = {path.name: path.read_text() for path in sorted((Path(__file__).parents[1] / "data" / "grammars").iterdir())}
BRIEF = (
    "columns_from.lark",
    "statements_tail.lark",
    "json_tool_call.lark",
    "sql.gbnf",
)
BUDGET = 24


def test_there_are_sixty_of_them() -> None:
    assert len(ZOO) >= 60
    assert sum(name.endswith(".lark") for name in ZOO) >= 25 and sum(name.endswith(".gbnf") for name in ZOO) >= 25


def kind_of(name: str) -> ConstraintKind:
    return Lark(ZOO[name]) if name.endswith(".lark") else Gbnf(ZOO[name])


def judge_of(name: str) -> Callable[[str], bool]:
    """Whether a text is a sentence of the grammar ``name``, said without the server's own parser."""
    if name == "json_tool_call.lark":
        return is_tool_call
    if name.endswith(".gbnf"):
        return Judge(ZOO[name]).takes
    parser = lark.Lark(ZOO[name], parser="earley", regex=True)

    def parses(text: str) -> bool:
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    return parses


def is_tool_call(text: str) -> bool:
    found = re.fullmatch(r"call (search|fetch|store)\((\{.*\})\)", text, re.DOTALL)
    value = json.loads(found[2]) if found else None
    return (
        isinstance(value, dict)
        and list(value) == ["query", "limit"]
        and isinstance(value["query"], str)
        and len(value["query"]) <= 20
        and value["limit"] in range(1, 11)
    )


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    causal = like(tiny_model(vision=False, seed=3), Attention.CAUSAL)
    return {"full": tiny_model(vision=False, seed=4), "causal": causal}


def asked(name: str, i: int, budget: int, *, causal: bool = False) -> Request:
    request = ask(
        f"{name}-{i}",
        max_new_tokens=budget,
        block=0 if causal else (8, 32, budget)[i % 3],
        steps=0 if causal else (0, 16)[i % 2],
        temperature=(0.0, 0.8, 2.0)[i % 3],
        seed=i,
    )
    return constrained(request, kind_of(name))


def test_grammars_are_kept(bench: Make, models: dict[str, LoadedModel]) -> None:
    calls = bench(models["full"]).submit(*(asked(name, i, BUDGET) for i, name in enumerate(BRIEF)))
    for name, call in zip(BRIEF, calls, strict=True):
        call.wait()
        assert call.finished().reason == "end"
        assert judge_of(name)(call.finished().text), (name, call.finished().text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "causal"])
@pytest.mark.parametrize("name", ZOO)
def test_every_grammar_is_kept(
    bench: Make, models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(harness, "PATIENCE", 240.0)  # a step with a long search takes a tenth of a second
    right = judge_of(name)
    requests = [asked(name, i, 3 * BUDGET, causal=kind == "causal") for i in range(4)]
    for call in bench(models[kind]).submit(*requests):
        call.wait()
        assert call.finished().reason == "end"
        assert right(call.finished().text), call.finished().text


@pytest.fixture(scope="module", params=["bundled", "bundled-causal"])
def shipped(request: pytest.FixtureRequest) -> LoadedModel:
    model = load_model(ModelConfig(path=request.param))
    assert isinstance(model, LoadedModel)
    return model


@pytest.mark.slow
@pytest.mark.timeout(600)  # classes of Unicode characters take minutes where other processes want the cores
@pytest.mark.parametrize("name", ZOO)
def test_the_bundled_models_keep_every_grammar(
    bench: Make, shipped: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(harness, "PATIENCE", 240.0)
    causal = shipped.spec.attention is Attention.CAUSAL
    right = judge_of(name)
    for call in bench(shipped).submit(*(asked(name, i, 2 * BUDGET, causal=causal) for i in range(2))):
        assert call.finished().reason == "end"
        assert right(call.finished().text), call.finished().text
