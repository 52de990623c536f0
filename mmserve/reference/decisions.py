"""Several typed questions about one scene or clip: yes or no, a choice, a score; the generated data has the answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from PIL import Image

from mmserve.core.decisions import CHOICE, INSTRUCTION, SCORE, YES_NO, Decision
from mmserve.reference import clips, images
from mmserve.reference.clips import DIRECTIONS, Clip, draw_clip
from mmserve.reference.items import Question
from mmserve.reference.scenes import COLORS, COLUMNS, KINDS, MAX_SHAPES, ROWS, SIZES, Scene, draw_scene, draw_shapes

#: Numbers of questions about one thing, drawn evenly. None sees the others: their number changes no answer.
QUESTIONS = (6, 8, 12, 16)
#: Most options of a choice about a scene, and most of one about a clip.
MOST_OPTIONS = 6
_POSITIONS = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)
_NO_PICTURE = Image.new("RGB", (1, 1))
_TRIES = 6


@dataclass(frozen=True)
class Answered:
    """A typed question and which of its answers is right."""

    decision: Decision
    right: int


@dataclass(frozen=True)
class Described:
    """A scene described in words, without its picture."""

    scene: Scene

    @property
    def text(self) -> str:
        """The description."""
        return f"{images.caption(self.scene, random.Random(0))[1]}."


@dataclass(frozen=True)
class Named:
    """Nothing to look at: questions about it name their answer."""


def draw_named(_rng: random.Random) -> Named:
    """What is asked about where a number has to be bound to an option, and no more."""
    return Named()


def draw_described(rng: random.Random) -> Described:
    """A scene in words."""
    return Described(Scene(draw_shapes(rng), _NO_PICTURE))


def draw_answered(thing: Thing, count: int, rng: random.Random) -> list[Answered]:
    """Up to ``count`` different questions about ``thing``, in random order; at least one."""
    makers = _ABOUT_CLIPS if isinstance(thing, Clip) else _ABOUT_NAMES if isinstance(thing, Named) else _ABOUT_SCENES
    shown = thing.scene if isinstance(thing, Described) else thing
    found: dict[str, Answered] = {}
    tries = 0
    while len(found) < count and (tries < _TRIES * count or not found):
        tries += 1
        made = rng.choice(makers)(shown, rng)
        if made is not None:
            found.setdefault(made.decision.text, made)
    return list(found.values())


def prompt_question(thing: Thing, answered: Answered) -> Question:
    """The prompt that asks ``answered`` of ``thing``; its text ends with the instruction."""
    context = f"{thing.text}\n" if isinstance(thing, Described) else ""
    decision = answered.decision
    return Question("decisions", context + INSTRUCTION, decision.answers[answered.right], decision=decision)


def option_offsets(decision: Decision) -> list[tuple[int, int]]:
    """The first character of each label, and the last of its option, in ``decision.asked``; only of a choice."""
    if decision.kind != CHOICE:
        return []
    labelled = [f" {answer} {option}" for answer, option in zip(decision.answers, decision.options, strict=True)]
    ends = list(accumulate(map(len, labelled), initial=len(decision.asked) - sum(map(len, labelled))))
    return [(begin + 1, end - 1) for begin, end in pairwise(ends)]


def _yes_no(text: str, yes: bool) -> Answered:
    return Answered(Decision(kind=YES_NO, text=text), 0 if yes else 1)


def _choice(text: str, answer: str, others: Sequence[str], rng: random.Random) -> Answered:
    """A choice of ``answer`` and some of ``others`` in random order."""
    rest = [option for option in dict.fromkeys(others) if option != answer]
    options = [answer, *rng.sample(rest, min(len(rest), rng.randint(1, MOST_OPTIONS - 1)))]
    rng.shuffle(options)
    return Answered(Decision(kind=CHOICE, text=text, options=tuple(options)), options.index(answer))


def _score(text: str, count: int, rng: random.Random) -> Answered:
    low, high = rng.choice((0, 0, 0, min(1, count))), rng.randint(max(count, MAX_SHAPES), 9)
    return Answered(Decision(kind=SCORE, text=text, low=low, high=high), count - low)


def _there(scene: Scene, rng: random.Random) -> Answered:
    text, answer = images.yes_no(scene, rng)
    return _yes_no(text, answer.startswith("yes"))


def _is_at(scene: Scene, rng: random.Random) -> Answered:
    """Whether a cell holds a shape of a name: half of the time it does, else the name or the place is another's."""
    shape = rng.choice(scene.shapes)
    name, place = shape.name, shape.position
    if rng.random() < 0.5:
        other = rng.random() < 0.5
        name = rng.choice([f"{c} {k}" for c in COLORS for k in KINDS if f"{c} {k}" != name]) if other else name
        place = place if other else rng.choice([p for p in _POSITIONS if p != place])
    there = any(s.name == name and s.position == place for s in scene.shapes)
    return _yes_no(f"Is the {name} at the {place}?", there)


def _compared(scene: Scene, rng: random.Random) -> Answered | None:
    asked = images.comparison(scene, rng)
    if asked is None:
        return None
    text, answer = asked
    if answer in ("yes", "no"):
        return _yes_no(text, answer == "yes")
    return _choice(text, answer, [f"the {s.name}" for s in scene.shapes], rng)


def _of(ask: Callable[[Scene, random.Random], tuple[str, str] | None], others: Sequence[str]) -> Make:
    def make(scene: Scene, rng: random.Random) -> Answered | None:
        asked = ask(scene, rng)
        return None if asked is None else _choice(*asked, others, rng)

    return make


def _what(scene: Scene, rng: random.Random) -> Answered:
    text, answer = images.what(scene, rng)
    near = [f"a {s.size} {s.name}" for s in scene.shapes]
    drawn = [f"a {rng.choice(SIZES)} {rng.choice(tuple(COLORS))} {rng.choice(KINDS)}" for _ in range(2)]
    return _choice(text, answer, [*near, *drawn, "nothing"], rng)


def _how_many(scene: Scene, rng: random.Random) -> Answered:
    name = rng.choice((*("shape",), *KINDS, *(f"{color} shape" for color in COLORS)))
    count = sum(name in ("shape", s.kind, f"{s.color} shape") for s in scene.shapes)
    return _score(f"How many {name}s are there?", count, rng)


def _seen(clip: Clip, rng: random.Random) -> Answered:
    """Whether a shape is to be seen at any time."""
    names = sorted(
        {a.shape.name for a in clip.actors} | {f"{a.turns[1]} {a.shape.kind}" for a in clip.actors if a.turns}
    )
    absent = [f"{c} {k}" for c in COLORS for k in KINDS if f"{c} {k}" not in names]
    yes = rng.random() < 0.5
    return _yes_no(f"Is there a {rng.choice(names if yes else absent)} in the video?", yes)


def _moves(clip: Clip, rng: random.Random) -> Answered:
    actor = rng.choice(clip.actors)
    return _yes_no(f"Does the {actor.shape.name} move?", bool(actor.moves))


def _direction(clip: Clip, rng: random.Random) -> Answered | None:
    asked = clips.direction(clip, rng)
    return None if asked is None else _choice(*asked, (*DIRECTIONS, "it stands still"), rng)


def _order(clip: Clip, rng: random.Random) -> Answered | None:
    asked = clips.order(clip, rng)
    return None if asked is None else _choice(*asked, [f"the {a.shape.name}" for a in clip.actors if a.appears], rng)


def _events(clip: Clip, rng: random.Random) -> Answered | None:
    asked = clips.events(clip, rng)
    return None if asked is None else _score(asked[0], int(asked[1]), rng)


def _when(clip: Clip, rng: random.Random) -> Answered | None:
    asked = clips.when(clip, rng)
    return None if asked is None else _choice(*asked, [f"at {second} s" for second in range(clip.seconds)], rng)


def _change(clip: Clip, rng: random.Random) -> Answered | None:
    asked = clips.change(clip, rng)
    if asked is None:
        return None
    name, turned = rng.choice(clip.actors).shape.name, rng.choice(tuple(COLORS))
    others = [f"the {name} {how}" for how in ("disappears", f"turns {turned}", *(f"moves {way}" for way in DIRECTIONS))]
    return _choice(*asked, [*others, "nothing"], rng)


def _pick(_nothing: Named, rng: random.Random) -> Answered:
    """Which number an option has that the question names."""
    names = rng.choice(
        (tuple(COLORS), KINDS, _POSITIONS, tuple(DIRECTIONS), [f"the {c} {k}" for c in COLORS for k in KINDS])
    )
    wanted = rng.choice(names)
    ask = rng.choice(("Pick {}.", "Which is {}?", "Where does it say {}?"))
    return _choice(ask.format(wanted), wanted, names, rng)


Make = Callable[..., Answered | None]
_ABOUT_SCENES: tuple[Make, ...] = (
    _there,
    _there,
    _is_at,
    _compared,
    _how_many,
    _how_many,
    _of(images.color, tuple(COLORS)),
    _of(images.shape, KINDS),
    _of(images.position, _POSITIONS),
    _what,
)
_ABOUT_NAMES: tuple[Make, ...] = (_pick,)
_ABOUT_CLIPS: tuple[Make, ...] = (_seen, _seen, _moves, _direction, _order, _events, _when, _change)
Thing = Scene | Described | Clip | Named
#: Kind of batch to how its things are drawn.
DECISIONS: dict[str, Callable[[random.Random], Thing]] = {
    "decisions": draw_scene,
    "decisions_text": draw_described,
    "decisions_video": draw_clip,
    "decisions_named": draw_named,
}
