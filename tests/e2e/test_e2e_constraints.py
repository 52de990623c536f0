"""Constraints over gRPC on the bundled model: valid answers, refusals that name the place, and nobody who waits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import pydantic
import pytest
from e2e_helpers import Running, answer, command_here, short_asks, wait_for

from mmserve.client import Client, DkvDecode, Edit, Finished, Threshold
from mmserve.errors import InvalidArgument
from mmserve.reference.images import FIELDS, scene_json
from mmserve.reference.scenes import COLORS, draw_scene
from mmserve.reference.tasks import sample


class Position(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    row: Literal["top", "middle", "bottom"]
    column: Literal["left", "center", "right"]


class Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    shape: Literal["circle", "square", "triangle"]
    color: str = pydantic.Field(max_length=12)
    size: Literal["small", "large"]
    position: Position


class Scene(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    objects: list[Shape] = pydantic.Field(max_length=4)


#: Long enough for four shapes.
BUDGET = 128


def ask_scene(client: Client, seed: int, **options: Any) -> Any:
    picture = draw_scene(random.Random(seed)).png()
    given = {"max_new_tokens": BUDGET, "schema": Scene, "timeout": 100.0, **options}
    return client.generate("Describe the scene as JSON.", images=[picture], **given)


@pytest.mark.parametrize(
    "options",
    [
        {"commit": Threshold(0.9)},
        {"commit": Threshold(0.5), "recompute": DkvDecode(4), "block_length": 32},
        {"commit": Edit(), "block_length": 32},
        {"commit": Threshold(0.9), "max_new_tokens": 30},
        {"commit": Threshold(0.9), "temperature": 1.0, "n": 2},
    ],
)
def test_pictures_become_instances(server: Running, options: dict[str, Any]) -> None:
    for seed in range(2):
        result = ask_scene(server.client, seed, **options)
        for each in result.samples:
            assert isinstance(each.parsed, Scene)
            assert jsonschema_rs.is_valid(Scene.model_json_schema(), json.loads(each.text))
            assert each.finish_reason == "end"
            assert each.usage.completion_tokens <= options.get("max_new_tokens", BUDGET)


def test_a_short_answer_takes_no_more_passes_than_bytes(server: Running) -> None:
    for seed in range(3):
        scene, question = sample("color", random.Random(seed))
        result = server.client.generate(question.text, images=[scene.png()], choices=list(COLORS))
        assert (result.text, result.finish_reason) == (question.answer, "end")
        assert result.forwards <= max(map(len, COLORS))
        result = server.client.generate("Is there a circle?", images=[scene.png()], schema={"type": "boolean"})
        assert isinstance(result.parsed, bool) and result.forwards <= len("false")


def test_final_text_streams_and_is_the_answer(server: Running) -> None:
    picture = draw_scene(random.Random(3)).png()
    events = list(
        server.client.stream(
            "Describe the scene as JSON.",
            images=[picture],
            schema=Scene.model_json_schema(),
            max_new_tokens=BUDGET,
            block_length=16,
            commit=Threshold(0.7),
            snapshots=True,
            timeout=100.0,
        )
    )
    assert isinstance(events[-1], Finished)
    assert "".join(getattr(e, "text", "") for e in events if type(e).__name__ == "Delta") == events[-1].text
    Scene.model_validate_json(events[-1].text)


def test_answers_do_not_depend_on_who_else_is_served(server: Running) -> None:
    alone = [answer(ask_scene(server.client, seed, commit=Threshold(0.8))) for seed in range(3)]
    others = [server.start(each.of, server.client) for each in short_asks(6)]
    together = [server.start(ask_scene, server.client, seed, commit=Threshold(0.8)) for seed in range(3)]
    assert [answer(f.result(100)) for f in together] == alone
    for other in others:
        other.result(100)


def test_a_refusal_names_place_and_keyword(server: Running) -> None:
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "contains": {"const": 1}, "minContains": 2}}}
    with pytest.raises(InvalidArgument) as caught:
        server.client.generate("hi", schema=schema)
    [violation] = caught.value.violations
    assert violation.field == "constraint.json_schema#/properties/a~1b/contains"
    assert violation.description.startswith("contains:")


def test_an_impossible_budget_is_refused_with_the_number_needed(server: Running) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
    with pytest.raises(InvalidArgument) as caught:
        server.client.generate("hi", schema=schema, max_new_tokens=10)
    [violation] = caught.value.violations
    assert violation.field == "sampling.max_new_tokens"
    least = int(violation.description.split("at least ")[1].split()[0])
    assert 20 < least <= 41
    result = server.client.generate("hi", schema=schema, max_new_tokens=least, commit=Threshold(0.5))
    assert jsonschema_rs.is_valid(schema, result.parsed) and result.usage.completion_tokens <= least


def bomb(number: int) -> dict[str, Any]:
    """A schema that its compiler does not finish in time."""
    properties = {f"p{i}": {"type": "string", "pattern": f"a{{{i + number}}}"} for i in range(4990)}
    return {"type": "object", "properties": properties}


def test_bombs_are_refused_while_others_are_served(server: Running) -> None:
    server.client.generate("warm", regex="a", max_new_tokens=2)  # the compiler is there
    bombs = [server.ask(f"bomb {i}", schema=bomb(i), timeout=60.0) for i in range(2)]
    wait_for("the bombs to be queued", lambda: len(server.stages()) == 2)
    plain = server.client.generate("How many shapes are there?", max_new_tokens=4)
    assert plain.forwards >= 1
    assert not any(each.done() for each in bombs[1:]), "the question waited for the compiler"
    for each in bombs:
        error = each.exception(timeout=60.0)
        assert isinstance(error, InvalidArgument) and error.violations[0].field == "constraint.json_schema"
    assert server.client.generate("after", choices=["yes", "no"], max_new_tokens=4).text in ("yes", "no")


def test_the_command_line_takes_constraints(server: Running, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    done = command_here("generate", "hi", "--server", server.address, "--schema", str(file), "--max-new-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert jsonschema_rs.is_valid(schema, json.loads(done.stdout))
    chosen = command_here("generate", "hi", "--server", server.address, "--choice", "left", "--choice", "right")
    assert chosen.stdout.strip() in ("left", "right")


@pytest.mark.slow
def test_a_schema_makes_every_answer_valid_and_no_answer_worse(server: Running) -> None:
    exact = {"with": 0, "without": 0}
    for seed in range(100, 130):
        truth = scene_json(draw_scene(random.Random(seed)), fields=FIELDS)
        for kind, schema in (("with", Scene), ("without", None)):
            result = ask_scene(server.client, seed, schema=schema, commit=Threshold(0.9))
            exact[kind] += result.text == truth
            if schema is not None:
                assert isinstance(result.parsed, Scene)
    assert exact["with"] >= exact["without"], exact
