"""Streams of generated clips, one frame a second, and questions whose answers are determined by the clips."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from PIL import Image

from mmserve.reference.clips import VIDEO, Clip, draw_clip
from mmserve.reference.items import TEST_SEEDS, Question
from mmserve.video.clock import CYCLE

#: Number of different clips: their pictures are rendered once.
CLIPS = 120
#: Fraction of a second at which frames are sampled.
PART = 0.5
_MOMENT = re.compile(r"\bat (\d+) s\b")


@dataclass(frozen=True)
class StreamedClip:
    """A clip in a stream, with the second of its first frame; it has a frame a second."""

    clip: Clip
    begin: int

    @property
    def end(self) -> int:
        """The second after its last frame."""
        return self.begin + self.clip.seconds

    def questions(self, rng: random.Random) -> list[Question]:
        """A question of each video task that the clip allows; moments in answers are frame labels."""
        asked = (VIDEO.ask(self.clip, task, rng) for task in VIDEO.tasks)
        return [replace(q, answer=_MOMENT.sub(self._labelled, q.answer)) for q in asked if q is not None]

    def named(self, rng: random.Random, others: list[StreamedClip]) -> list[Question]:
        """The ``questions`` about a shape that no clip of ``others`` contains."""
        own = shapes(self.clip) - {name for other in others for name in shapes(other.clip)}
        return [q for q in self.questions(rng) if any(name in q.text for name in own)]

    def _labelled(self, moment: re.Match[str]) -> str:
        return f"at {(self.begin + int(moment[1])) % CYCLE} s"


def shapes(clip: Clip) -> set[str]:
    """Names of all shapes that appear in a clip."""
    turned = {f"{a.turns[1]} {a.shape.kind}" for a in clip.actors if a.turns is not None}
    return turned | {a.shape.name for a in clip.actors}


def clips_of(seed: int, seconds: int) -> list[StreamedClip]:
    """Consecutive clips of the stream ``seed`` for at least ``seconds``; the first starts at a random second."""
    rng = random.Random(f"stream of clips {seed}")
    found: list[StreamedClip] = []
    at = 0
    while at < seconds:
        shown = StreamedClip(drawn_clip(rng.randrange(CLIPS)), at)
        found.append(shown)
        at = shown.end
    return found


@lru_cache(CLIPS)
def drawn_clip(number: int) -> Clip:
    """One of the ``CLIPS`` clips, which are not in the training data."""
    return draw_clip(random.Random(TEST_SEEDS[-1 - number]))


@lru_cache(8 * CLIPS)
def picture(clip: Clip, second: int) -> Image.Image:
    """The frame of a clip in its ``second``-th second."""
    return clip.frames([second + PART]).pictures[0]


def clip_at(clips: Sequence[StreamedClip], second: int) -> StreamedClip:
    """The clip of a stream at ``second``."""
    return next(shown for shown in clips if shown.begin <= second < shown.end)


def question_at(clips: Sequence[StreamedClip], second: int, rng: random.Random) -> str:
    """A question about the clip at ``second``, or about the first clip if that allows none."""
    return rng.choice(clip_at(clips, second).questions(rng) or clips[0].questions(rng)).text


def frame_at(clips: Sequence[StreamedClip], second: int) -> Image.Image:
    """The frame of a stream at ``second``."""
    shown = clip_at(clips, second)
    return picture(shown.clip, second - shown.begin)
