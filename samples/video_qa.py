"""Ask about a video while it plays: ``python samples/video_qa.py FILM.mp4 [--server HOST:PORT]``.

The file is played in real time; type a question and press return. Each answer is printed, and saved as a picture of the
frame that was the newest when you asked.
"""

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import av
from PIL import Image, ImageDraw

from mmserve.client import Client, ConfigError, MMServeError, Question, VideoSession

FRAME_HEIGHT = 360


def main(arguments: list[str] | None = None) -> int:
    """Play, ask, answer."""
    parser = argparse.ArgumentParser(description="Ask about a video while it plays.")
    parser.add_argument("film", type=Path)
    parser.add_argument("--server", help="HOST:PORT")
    parser.add_argument("--model", help="a model that takes sessions (`mmserve models` lists them)")
    parser.add_argument("--out", type=Path, default=Path("answers"), help="folder for pictures (default: answers)")
    parser.add_argument("--at-once", action="store_true", help="push the file as fast as the server takes it")
    asked = parser.parse_args(arguments)
    if not asked.film.is_file():
        parser.error(f"there is no file {asked.film}")
    asked.out.mkdir(parents=True, exist_ok=True)
    with Client(asked.server) as client, client.video_session(model=asked.model, rate=2.0) as session:
        playing = threading.Thread(target=_play, args=(session, asked.film, not asked.at_once), daemon=True)
        playing.start()
        if asked.at_once:
            playing.join()
        answers: list[threading.Thread] = []
        for line in sys.stdin:
            if text := line.strip():
                question = session.stream(text, max_new_tokens=32)
                name = asked.out / f"answer-{len(answers) + 1}.png"
                answers.append(threading.Thread(target=_answer, args=(question, text, asked.film, name)))
                answers[-1].start()
        for answer in answers:
            answer.join()
    return 0


def _play(session: VideoSession, film: Path, realtime: bool) -> None:
    try:
        session.push_file(film, realtime=realtime, segment_seconds=1.0)
    except MMServeError as error:
        print(f"the video stops: {error}", file=sys.stderr)


def _answer(question: Question, text: str, film: Path, name: Path) -> None:
    begun = time.monotonic()
    try:
        answer = question.result().text
    except MMServeError as error:
        print(f"{text} -> {error}", file=sys.stderr)
        return
    seconds = question.asked.end if question.asked is not None else 0.0
    print(f"[{seconds:.1f} s] {text} -> {answer}  ({1000 * (time.monotonic() - begun):.0f} ms)", flush=True)
    annotated(frame_at(film, seconds), f"{seconds:.1f} s   {text}\n{answer}").save(name)


def frame_at(film: Path, seconds: float) -> Image.Image:
    """The frame that a film shows so many seconds after its first one."""
    with av.open(str(film)) as container:
        first: float | None = None
        shown: Any = None
        for frame in container.decode(video=0):
            time_of = float(frame.time or 0.0)
            first = time_of if first is None else first
            if shown is not None and time_of - first > seconds + 1e-3:
                break
            shown = frame
        if shown is None:
            raise ValueError(f"{film} has no frames")
        image: Image.Image = shown.to_image()
        return image


def annotated(image: Image.Image, text: str) -> Image.Image:
    """A frame with a text below it."""
    width = max(480, image.width * FRAME_HEIGHT // image.height)
    card = Image.new("RGB", (width, FRAME_HEIGHT + 48), "white")
    card.paste(image.resize((image.width * FRAME_HEIGHT // image.height, FRAME_HEIGHT)), (0, 0))
    ImageDraw.Draw(card).text((8, FRAME_HEIGHT + 8), text, "black")
    return card


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, MMServeError) as error:
        sys.exit(str(error))
