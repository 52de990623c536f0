"""Windows of a video stream, and questions about them whose answers the generated clips determine.

A stream is clip after clip at ``STREAM_RATE``. What a model sees of it at one moment is a window::

    header | carriers | whole frames | the rest of the chat template with the question

The header is the chat template up to the video placeholder. A carrier is one position: the mean of an old frame's
visual rows, without a label. A whole frame is its label, ``"{second % 8}s:"`` with the stream's second, and then its
visual rows. Positions count from 0 without gaps. A clip may begin at any second and with any part of a second, and the
newest frame may lie anywhere in its clip.

A question without a time, or about the last N seconds, is about the newest clip as far as its whole frames show it;
one that begins with "Earlier" is about an older clip that is whole in the window, and names a shape that only that clip
has. A question that the image tasks ask is about the newest frame. Moments are answered as labels ("at 3 s"), which
name exactly one of the last eight frames; lengths of time as a number of seconds ("for 3 s").
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from PIL import Image

from mmserve.reference.clips import NARRATION, VIDEO, Actor, Clip, draw_clip
from mmserve.reference.images import IMAGE, SHORT_TASKS
from mmserve.reference.items import TRAIN_SEEDS, Question, Subject
from mmserve.reference.scenes import COLORS, KINDS, Scene, Shape

#: Frames a second of a stream; labels of frames repeat after so many seconds.
STREAM_RATE, LABEL_CYCLE = 1, 8
#: Whole frames and carriers of a window in training: values and how often each is drawn.
WHOLE = ((1, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 32, 40), (2, 2, 3, 3) + (6,) * 9 + (5, 8, 3, 1, 1))
CARRIERS = ((0, 4, 8, 16, 32, 48, 64), (50, 5, 8, 12, 10, 7, 8))
#: Longest window of training, in positions of its frames and carriers; positions of a frame with its label, and about
#: those of a question with its answer; positions and rows of a batch.
MAX_POSITIONS, FRAME_POSITIONS, QUESTION_POSITIONS = 500, 12, 25
BATCH_POSITIONS, MOST_ROWS = 2400, 16
#: How often the newest frame is the last of its clip; else it is anywhere in it.
ENDED = 0.5
#: How often an older clip is asked about by "In the last N seconds", which reach back to it, and not by "Earlier".
RECENT = 0.3
#: Clips that training draws its windows from: their frames pass the tower once.
TRAINING_CLIPS = 3000
#: Frames that must show a movement before its direction is asked for, and any other event.
MOVEMENT_FRAMES, EVENT_FRAMES = 3, 2
#: How far (in cells) a moving shape may be from the middle of a cell where its place is asked for.
CENTERED = 0.2
#: The image tasks read the shapes of a scene only.
_NO_PICTURE = Image.new("RGB", (1, 1))
_MOMENT = re.compile(r"\bat (\d+) s\b")


@cache
def training_clips() -> tuple[Clip, ...]:
    """The ``TRAINING_CLIPS`` clips."""
    return tuple(draw_clip(random.Random(TRAIN_SEEDS[-1] - number)) for number in range(TRAINING_CLIPS))


def frame_times(clip: Clip) -> list[float]:
    """When, in seconds of the clip, its frames are taken: one each second, the part of a second its own."""
    part = random.Random(clip.look).random()
    return [second + part for second in range(clip.seconds)]


@dataclass(frozen=True)
class Window:
    """What a model sees of a stream: frames ``(clip, frame)`` from the oldest to the newest, carriers first.

    ``second`` is the newest frame's second in the stream; ``carriers`` is how many of the frames are carriers.
    """

    clips: tuple[Clip, ...]
    frames: tuple[tuple[int, int], ...]
    carriers: int
    second: int

    @property
    def whole(self) -> tuple[tuple[int, int], ...]:
        """The frames that are not carriers."""
        return self.frames[self.carriers :]

    def label(self, index: int) -> int:
        """The label of the ``index``-th whole frame, a second modulo ``LABEL_CYCLE``."""
        return (self.second - (len(self.whole) - 1 - index)) % LABEL_CYCLE

    def indices_of(self, clip: int) -> range:
        """Which of the whole frames (by index) show the ``clip``-th clip."""
        indices = [index for index, (of, _frame) in enumerate(self.whole) if of == clip]
        return range(indices[0], indices[-1] + 1) if indices else range(0)

    def visible_part(self, clip: int) -> Clip:
        """The ``clip``-th clip as far as whole frames show it, at least one."""
        indices = self.indices_of(clip)
        return cut(self.clips[clip], self.whole[indices[0]][1], self.whole[indices[-1]][1])


def draw_window(rng: random.Random, whole: int, carriers: int, clips: Sequence[Clip]) -> Window:
    """A window of ``carriers`` and then ``whole`` frames at a random moment of a stream of some of ``clips``."""
    newest = rng.choice(clips)
    last = newest.seconds - 1 if rng.random() < ENDED else rng.randrange(newest.seconds)
    drawn = [newest]
    frames = [(0, frame) for frame in range(last, -1, -1)]  # clips are counted backwards from the newest here
    while len(frames) < whole + carriers:
        older = rng.choice(clips)
        frames += [(len(drawn), frame) for frame in range(older.seconds - 1, -1, -1)]
        drawn.append(older)
    kept = frames[: whole + carriers]
    first = kept[-1][0]
    return Window(
        tuple(reversed(drawn[: first + 1])),
        tuple((first - clip, frame) for clip, frame in reversed(kept)),
        carriers,
        rng.randrange(whole + carriers - 1, 86_400),
    )


def cut(clip: Clip, first: int, last: int) -> Clip:
    """``clip`` as only its seconds ``first`` to ``last`` (inclusive) show it, its times counted from ``first``.

    What happened up to ``first`` was so from the start; what comes after ``last`` does not happen.
    """
    actors = []
    for actor in clip.actors:
        if actor.appears > last or (actor.leaves is not None and actor.leaves <= first):
            continue
        shape, turns = actor.shape, actor.turns
        if turns is not None and turns[0] <= first:
            shape, turns = replace(shape, color=turns[1]), None
        elif turns is not None:
            turns = (turns[0] - first, turns[1]) if turns[0] <= last else None
        leaves = actor.leaves - first if actor.leaves is not None and actor.leaves <= last else None
        actors.append(replace(actor, shape=shape, appears=max(0, actor.appears - first), leaves=leaves, turns=turns))
    return Clip(clip.kind, tuple(actors), last - first + 1, clip.look)


def moments(clip: Clip) -> set[int]:
    """The seconds of the clip at which something happens, but for movement."""
    found = {a.appears for a in clip.actors if a.appears} | {a.leaves for a in clip.actors if a.leaves is not None}
    return found | {a.turns[0] for a in clip.actors if a.turns is not None}


def ask(window: Window, rng: random.Random) -> list[Question]:
    """Questions about ``window``, of every kind that it determines the answer of, in random order."""
    newest = len(window.clips) - 1
    asked = [*about_clip(window, newest, rng), *lately(window, rng), *about_now(window, rng)]
    asked += [question for older in range(newest) for question in earlier(window, older, rng)]
    found = {question.text: question for question in asked}
    return rng.sample(list(found.values()), len(found))


def about_clip(window: Window, clip: int, rng: random.Random) -> list[Question]:
    """A question of each video task, and of ``duration`` and ``narration``, about a clip as the whole frames show it.

    None where its oldest whole frame is the one in which something happens: whether that is new cannot be seen.
    """
    indices = window.indices_of(clip)
    first = window.whole[indices[0]][1] if indices else 0
    if len(indices) < EVENT_FRAMES or (first and first in moments(window.clips[clip])):
        return []
    return _about(window.visible_part(clip), window.label(indices[0]), rng)


def _about(clip: Clip, label: int, rng: random.Random) -> list[Question]:
    """Questions about ``clip``, all of it, whose first frame has ``label``."""
    if not clip.actors:
        return []
    tasks = [task for task in VIDEO.tasks if task != "direction" or clip.seconds >= MOVEMENT_FRAMES]
    if any(actor.moves for actor in clip.actors) and clip.seconds < MOVEMENT_FRAMES:
        tasks.remove("change")
    asked = [VIDEO.ask(clip, task, rng) for task in tasks]
    asked += [DURATION.ask(clip, "duration", rng)]
    if clip.seconds >= MOVEMENT_FRAMES:
        asked += [NARRATION.ask(clip, "narration", rng)]
    return [replace(q, answer=_labelled(q.answer, label)) for q in asked if q is not None]


def _labelled(answer: str, first: int) -> str:
    """``answer`` with its moments, seconds of a clip, as labels; ``first`` is the label of the clip's first second."""
    return _MOMENT.sub(lambda found: f"at {(int(found[1]) + first) % LABEL_CYCLE} s", answer)


def duration(clip: Clip, rng: random.Random) -> tuple[str, str] | None:
    """How many seconds a shape, one that keeps its colour, is to be seen."""
    same = [a for a in clip.actors if a.turns is None]
    if not same:
        return None
    actor = rng.choice([a for a in same if a.appears or a.leaves is not None] or same)
    seconds = (clip.seconds if actor.leaves is None else actor.leaves) - actor.appears
    return f"For how long is the {actor.shape.name} visible?", f"for {seconds} s"


DURATION = Subject(draw_clip, lambda clip: (clip.frames(),), {"duration": duration})


def lately(window: Window, rng: random.Random) -> list[Question]:
    """Questions about the last N seconds, which the newest clip fills: of it only those seconds count."""
    newest = len(window.clips) - 1
    last = window.whole[-1][1]
    shown = len(window.indices_of(newest))
    if shown < EVENT_FRAMES:
        return []
    seconds = rng.randint(EVENT_FRAMES, shown)
    first = last - seconds + 1
    clip = window.clips[newest]
    if first and first in moments(clip):
        return []
    label = window.label(len(window.whole) - seconds)
    asked = [q for q in _about(cut(clip, first, last), label, rng) if q.task != "narration"]
    return [replace(q, task="lately", text=in_the_last(seconds, q.text)) for q in asked]


def in_the_last(seconds: int, text: str) -> str:
    """The question ``text`` about the last ``seconds``."""
    return f"In the last {seconds} seconds, {_continued(text)}"


def earlier(window: Window, clip: int, rng: random.Random) -> list[Question]:
    """Questions about an older clip that is whole in the window, each naming a shape that no other frame shows."""
    if len(window.indices_of(clip)) < window.clips[clip].seconds:
        return []
    others = {name for index, other in enumerate(window.clips) if index != clip for name in _names(other.actors)}
    own = _names(window.clips[clip].actors)
    if own & others:
        return []
    asked = about_clip(window, clip, rng)
    named = [q for q in asked if q.task != "narration" and any(name in q.text for name in own)]
    ago = len(window.whole) - window.indices_of(clip)[0]
    found = []
    for question in named:
        seconds = rng.randint(ago, len(window.whole))
        text = in_the_last(seconds, question.text) if rng.random() < RECENT else said_earlier(question.text)
        found.append(replace(question, task="earlier", text=text))
    return found


def said_earlier(text: str) -> str:
    """The question ``text`` about a clip before the newest one."""
    return f"Earlier, {_continued(text)}"


def _continued(text: str) -> str:
    """A question's text after a time."""
    text = text.replace(" during the video", "").replace(" in the video", "")
    return text[0].lower() + text[1:]


def _names(actors: Sequence[Actor]) -> set[str]:
    turned = {f"{a.turns[1]} {a.shape.kind}" for a in actors if a.turns is not None}
    return turned | {a.shape.name for a in actors}


def about_now(window: Window, rng: random.Random) -> list[Question]:
    """Questions of the image tasks about the newest frame, one about a shape that only older frames show among them."""
    of, frame = window.frames[-1]
    shapes = visible(window.clips[of], frame)
    if shapes is None:
        return []
    gone = {name for clip in window.clips for name in _names(clip.actors)} - {shape.name for shape in shapes}
    any_name = f"{rng.choice(tuple(COLORS))} {rng.choice(KINDS)}"
    asked: list[Question | None] = []
    if gone or not shapes:
        asked.append(Question("yes_no", f"Is there a {rng.choice(sorted(gone) or [any_name])}?", "no"))
    if shapes:
        scene = Scene(shapes, _NO_PICTURE)
        asked += [IMAGE.ask(scene, task, rng) for task in ("yes_no", "yes_no", rng.choice(SHORT_TASKS))]
    return [replace(q, task="now") for q in asked if q is not None]


def visible(clip: Clip, frame: int) -> tuple[Shape, ...] | None:
    """The shapes that a frame shows, in reading order; None where one is between two cells."""
    time = frame_times(clip)[frame]
    found = []
    for actor in clip.actors:
        if actor.there(time):
            row, column = actor.place(time, clip.seconds)
            if max(abs(row - round(row)), abs(column - round(column))) > CENTERED:
                return None
            found.append(replace(actor.shape, color=actor.color(time), row=round(row), column=round(column)))
    return tuple(sorted(found, key=lambda s: (s.row, s.column)))


def draw_rows(
    rng: random.Random, scale: float, questions: int, clips: Sequence[Clip], *, carriers: bool
) -> list[tuple[Window, list[Question]]]:
    """Windows of one layout for a batch, each with up to ``questions`` questions; ``carriers``: some have carriers.

    ``scale`` multiplies ``BATCH_POSITIONS``.
    """
    while True:
        whole = rng.choices(*WHOLE)[0]
        carried = rng.choices(*CARRIERS)[0] if carriers else 0
        positions = FRAME_POSITIONS * whole + carried
        if positions <= MAX_POSITIONS:
            break
    rows = max(1, round(scale * min(MOST_ROWS, BATCH_POSITIONS / (positions + QUESTION_POSITIONS * questions))))
    found: list[tuple[Window, list[Question]]] = []
    while len(found) < rows:
        window = draw_window(rng, whole, carried, clips)
        if asked := ask(window, rng)[:questions]:
            found.append((window, asked))
    return found
