"""Watch a canvas fill in: ``python samples/watch_the_canvas.py OUT.gif [HOST:PORT]``.

Draws a scene, asks for it as JSON, and writes the scene beside every snapshot of the canvas as an animated GIF.
"""

import random
import sys

from PIL import Image, ImageDraw, ImageFont

from mmserve.client import Client, ConfigError, Finished, MMServeError, Snapshot, Threshold
from mmserve.reference.scenes import PICTURE, draw_scene

WIDTH, LINE, MARGIN, OPEN_WIDTH = 430, 22, 16, 9
INK, OPEN, PAPER = (30, 30, 30), (190, 205, 225), (250, 250, 250)


def frame(scene: Image.Image, text: str, caption: str) -> Image.Image:
    """One picture of the animation: the scene, the canvas with a bar for each open position, and a caption."""
    page = Image.new("RGB", (MARGIN * 3 + PICTURE + WIDTH, MARGIN * 2 + PICTURE + LINE), PAPER)
    page.paste(scene, (MARGIN, MARGIN))
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(15)
    left, x, y = MARGIN * 2 + PICTURE, 0.0, MARGIN
    for character in text:
        advance = OPEN_WIDTH if character == "▒" else font.getlength(character)
        if x + advance > WIDTH:
            x, y = 0.0, y + LINE
        if character == "▒":
            pen.rectangle([left + x, y + 3, left + x + OPEN_WIDTH - 2, y + LINE - 5], fill=OPEN)
        else:
            pen.text((left + x, y), character, fill=INK, font=font)
        x += advance
    pen.text((left, PICTURE + MARGIN), caption, fill=INK, font=font)
    return page


def main(out: str, target: str) -> None:
    """Ask, and write the animation to ``out``."""
    scene = draw_scene(random.Random(24))
    frames: list[Image.Image] = []
    with Client(target) as client:
        events = client.stream(
            "Describe the scene as JSON.", [scene.png()], snapshots=True, max_new_tokens=128, commit=Threshold(0.9999)
        )
        for event in events:
            if isinstance(event, Snapshot):
                caption = f"forward pass {event.forwards}: {event.committed} of {event.total} positions final"
                frames.append(frame(scene.picture, event.text, caption))
            elif isinstance(event, Finished):
                caption = f"done: {event.forwards} forward passes, {event.times.total:.0f} ms"
                frames.append(frame(scene.picture, event.text, caption))
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=[500] * (len(frames) - 1) + [3000], loop=0)
    print(f"{len(frames)} pictures in {out}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "localhost:50051")
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
