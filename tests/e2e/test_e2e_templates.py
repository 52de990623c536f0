"""Templates and scaffolds over gRPC on the bundled models."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema_rs
import pytest
from e2e_helpers import Running, command

from mmserve.client import Client, Delta, Finished, Hole, Result, Snapshot, Threshold
from mmserve.errors import InvalidArgument
from mmserve.reference.evaluate import item
from mmserve.reference.images import FIELDS, scene_json
from mmserve.reference.scenes import COLORS, COLUMNS, KINDS, ROWS, SIZES, Scene, draw_scene


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def counted(scene: Scene) -> dict[str, Any]:
    """The schema of a scene with so many shapes."""
    place = an_object(row={"enum": list(ROWS)}, column={"enum": list(COLUMNS)})
    names = {"shape": KINDS, "color": COLORS, "size": SIZES}
    shape = an_object(**{name: {"enum": list(values)} for name, values in names.items()}, position=place)
    count = len(scene.shapes)
    return an_object(objects={"type": "array", "items": shape, "minItems": count, "maxItems": count})


def described(client: Client, scene: Scene, **options: Any) -> Result:
    return client.generate(
        "Describe the scene as JSON.",
        images=[scene.png()],
        schema=counted(scene),
        max_new_tokens=128,
        timeout=300.0,
        **options,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [{"commit": Threshold(0.9)}, {"steps": 32}, {"steps": 128}])
def test_what_a_scaffold_changes(server: Running, options: dict[str, Any]) -> None:
    """Speed and quality with and without; ``pytest -m slow -s tests/e2e/test_e2e_templates.py`` prints them."""
    scenes = [item("json", i, 0)[0] for i in range(48)]
    forwards: dict[bool, list[int]] = {}
    right: dict[bool, int] = {}
    for scaffold in (False, True):
        results = [described(server.client, scene, scaffold=scaffold, **options) for scene in scenes]
        for scene, result in zip(scenes, results, strict=True):
            assert jsonschema_rs.is_valid(counted(scene), json.loads(result.text))
            assert not result.warnings
        forwards[scaffold] = [result.forwards for result in results]
        found = zip(results, scenes, strict=True)
        right[scaffold] = sum(result.text == scene_json(scene, fields=FIELDS) for result, scene in found)
        each = sorted(forwards[scaffold])
        print(f"{options} scaffold={scaffold}: {right[scaffold]} of {len(scenes)} right,", end=" ", flush=True)
        print(f"forwards median {median(each)}, from {each[0]} to {each[-1]}", flush=True)
    if "steps" in options:  # where the schedule sets the pace, what stands there already needs no step
        assert median(forwards[True]) < median(forwards[False])


FORM = ["shape: ", Hole(choices=KINDS, max_tokens=2), "; where: ", Hole(regex="[a-z ]{3,20}", max_tokens=8), "."]


def test_a_form_is_filled_in(server: Running) -> None:
    """Streamed and at once, alone and among others, with every text in its place from the first event on."""
    scene = draw_scene(random.Random(5))
    asked: dict[str, Any] = {"images": [scene.png()], "template": FORM, "max_new_tokens": 32, "timeout": 100.0}
    events = list(server.client.stream("What is in the picture?", snapshots=True, **asked))
    done = events[-1]
    assert isinstance(done, Finished)
    assert done.text == f"shape: {done.holes[0]}; where: {done.holes[1]}."
    assert done.holes[0] in KINDS and re.fullmatch("[a-z ]{3,20}", done.holes[1])
    assert "".join(event.text for event in events if isinstance(event, Delta)) == done.text
    shown = [event.text for event in events if isinstance(event, Snapshot)]
    assert shown and all(re.fullmatch("shape: .*; where: .*[.]", text) for text in shown)
    others = [server.start(server.client.generate, "Describe the scene.", max_new_tokens=8) for _ in range(3)]
    again = server.client.generate("What is in the picture?", **asked)
    assert (again.text, again.holes, again.forwards) == (done.text, done.holes, done.forwards)
    assert all(other.result().holes == () for other in others)


def test_a_template_that_does_not_fit_is_refused(server: Running) -> None:
    with pytest.raises(InvalidArgument, match="at least") as refused:
        server.client.generate("x", template=FORM, max_new_tokens=8)
    assert [violation.field for violation in refused.value.violations] == ["sampling.max_new_tokens"]


def test_a_scaffold_that_a_schema_does_not_admit_is_a_warning(server: Running) -> None:
    result = server.client.generate("x", schema={"type": "integer"}, scaffold=True, max_new_tokens=12)
    assert isinstance(result.parsed, int)
    assert [warning for warning in result.warnings if warning.startswith("scaffold has no effect")]


def test_the_command_line_reads_a_template(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "form.json"
    path.write_text(json.dumps(["shape: ", {"choices": ["circle", "square"], "max_tokens": 2}]))
    done = command("generate", "x", "--server", server.address, "--template", str(path), "--json")
    assert json.loads(done.stdout)["holes"][0] in ("circle", "square")
