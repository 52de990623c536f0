"""Convert images of scenes to a table: ``python samples/scenes_to_csv.py [HOST:PORT] > shapes.csv``.

Draws scenes and asks for each of them as JSON under a schema. Every answer is valid under the schema, so
the program does not check it; the number of completely correct scenes is printed at the end.
"""

import csv
import random
import sys
from typing import Any

from mmserve.client import Client, ConfigError, MMServeError, Options, Threshold
from mmserve.reference.images import FIELDS, scene_json
from mmserve.reference.scenes import COLORS, COLUMNS, KINDS, MAX_SHAPES, ROWS, SIZES, draw_scene

POSITION = {"row": {"enum": list(ROWS)}, "column": {"enum": list(COLUMNS)}}


def an_object(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with just these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SHAPE = an_object(
    {
        "shape": {"enum": list(KINDS)},
        "color": {"enum": list(COLORS)},
        "size": {"enum": list(SIZES)},
        "position": an_object(POSITION),
    }
)
SCENE = an_object({"objects": {"type": "array", "items": SHAPE, "maxItems": MAX_SHAPES}})


def main(target: str) -> None:
    """Write a row for each shape that is seen."""
    rows = csv.writer(sys.stdout)
    rows.writerow(["picture", "shape", "color", "size", "row", "column"])
    scenes = [draw_scene(random.Random(i)) for i in range(8)]
    right = 0
    with Client(target) as client:
        for i, scene in enumerate(scenes):
            options: Options = {"max_new_tokens": 128, "commit": Threshold(0.9)}
            result = client.generate("Describe the scene as JSON.", [scene.png()], schema=SCENE, **options)
            for seen in result.parsed["objects"]:
                position = seen.pop("position")
                rows.writerow([i, *seen.values(), position["row"], position["column"]])
            right += result.text == scene_json(scene, fields=FIELDS)
    print(f"{right} of {len(scenes)} scenes are right in every detail", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051")
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
