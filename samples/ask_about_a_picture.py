"""Ask about a picture: ``python samples/ask_about_a_picture.py [HOST:PORT]`` (needs a running ``mmserve serve``).

Draws a scene, uploads it once, asks several questions about it and prints the answers.
"""

import random
import sys

from mmserve.client import Client, ConfigError, MMServeError, Threshold
from mmserve.reference.images import FIELDS, scene_json
from mmserve.reference.scenes import draw_scene

QUESTIONS = ("How many shapes are there, and where?", "Is there a red shape?", "Describe the scene as JSON.")


def main(target: str) -> None:
    """Upload one picture and ask about it."""
    scene = draw_scene(random.Random(7))
    with Client(target) as client:
        picture = client.upload(scene.png())
        for question in QUESTIONS:
            result = client.generate(question, images=[picture], commit=Threshold(0.9), max_new_tokens=128)
            print(f"{question}\n  {result.text}   ({result.forwards} forward passes, {result.times.total:.0f} ms)")
    print(f"truth:\n  {scene_json(scene, fields=FIELDS)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051")
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
