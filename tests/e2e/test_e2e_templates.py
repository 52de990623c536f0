"""Templates and scaffolds over gRPC on the bundled models."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import jsonschema_rs
import pytest
from e2e_helpers import Running

from mmserve.client import Client, Result, Threshold
from mmserve.reference.evaluate import item
from mmserve.reference.images import FIELDS, scene_json
from mmserve.reference.scenes import COLORS, COLUMNS, KINDS, ROWS, SIZES, Scene


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
    assert median(forwards[True]) < median(forwards[False])
