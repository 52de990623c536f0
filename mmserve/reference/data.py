"""Training batches: things to ask about and chats about them, drawn from a seed, as tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmserve.core.decisions import Decision
from mmserve.models.chat import IMAGE, VIDEO, prompt_ids
from mmserve.models.decisions import answer_tokens, closing_ids, question_ids
from mmserve.reference.auxiliary import SceneLabels, change_labels, window_labels
from mmserve.reference.batch import NO_COLUMN, Batch
from mmserve.reference.calls import CALLS, COPIES, DICTATED
from mmserve.reference.clips import NARRATION, Clip, through_h264
from mmserve.reference.decisions import DECISIONS, QUESTIONS, draw_answered, option_offsets, prompt_question
from mmserve.reference.images import LISTING, SHORT_TASKS, WATCH
from mmserve.reference.items import TRAIN_SEEDS, Question, Subject
from mmserve.reference.model import FRAME_TIME, FRAME_TOKENS, FRAMES, PIXELS, VISUAL_TOKENS
from mmserve.reference.pairs import CELLS, Pair
from mmserve.reference.recipe import MIXES, REPEATED
from mmserve.reference.scenes import Scene, Shape
from mmserve.reference.streams import Window, draw_rows, training_clips
from mmserve.reference.streams import frame_times as stream_times
from mmserve.reference.tasks import SUBJECTS
from mmserve.reference.tokenizer import EOT, token_id
from mmserve.reference.value_sources import source_tokens, value_spans

#: Mean and deviation of the processor, per channel: pixels come out in [-1, 1].
PIXEL_MEAN = PIXEL_STD = 0.5
#: Tokens of a block, as block-wise decoding will fill the canvas.
BLOCK = 32
#: Padding after an answer's end counts this much of a token: it is easy, and most of a short answer's canvas.
PADDING_WEIGHT = 0.1
#: One clip in so many is written as H.264 and read again, so that the model knows what compression does.
COMPRESSED = 8


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How batches of one kind of subject are made: their rows, and canvas lengths with their shares.

    Packed batches have half the rows, and ``packed`` questions about what each row shows.
    """

    rows: int
    packed: int = 1
    canvas: tuple[tuple[int, ...], tuple[float, ...]] = ((16, 32), (0.8, 0.2))


#: One question a row: chats of several turns were learned from more slowly, the answers being easily bound to each
#: other's questions.
ROWS = {
    "image": Rows(rows=48, packed=4),
    "listing": Rows(rows=32, canvas=((48,), (1.0,))),
    "json": Rows(rows=24, canvas=((64, 96, 128), (0.15, 0.15, 0.7))),
    "video": Rows(rows=32, packed=4),
    "narration": Rows(rows=16, canvas=((48,), (1.0,))),
    "text": Rows(rows=48, canvas=((48, 64), (0.3, 0.7))),
    "pair": Rows(rows=24, packed=4),
    "cells": Rows(rows=16, canvas=((64,), (1.0,))),
    "watch": Rows(rows=24, canvas=((16,), (1.0,))),
    "stream": Rows(rows=16, packed=8),
    "calls": Rows(rows=14, packed=4, canvas=((64, 96, 128, 224), (0.3, 0.3, 0.3, 0.1))),
    "dictated": Rows(rows=16, canvas=((0,), (1.0,))),
    "copies": Rows(rows=24, canvas=((0,), (1.0,))),
    "decisions": Rows(rows=24, canvas=((0,), (1.0,))),
    "decisions_text": Rows(rows=24, canvas=((0,), (1.0,))),
    "decisions_video": Rows(rows=24, canvas=((0,), (1.0,))),
    "decisions_named": Rows(rows=24, canvas=((0,), (1.0,))),
}
#: Positions of a batch of typed questions at most, and about those of what they are about and of each with its slot.
DECISION_POSITIONS, CONTEXT_POSITIONS, DECISION_LENGTH = 1600, 130, 26
#: Written in random order, so that the unmasked part of an answer must name its subject.
UNORDERED = {"listing": LISTING, "narration": NARRATION, "cells": CELLS}
#: Kinds of subject whose answers are copied from the prompt.
COPIED = ("copies", "dictated")
#: Kinds of subject with tools.
CALLING = ("calls", "dictated")
#: Kinds of subject that are text alone.
WITHOUT_MEDIA = ("text", "calls", *COPIED, "decisions_text", "decisions_named")
#: Kinds of subject whose rows differ much in length. So many times the rows of a batch are drawn and sorted by length,
#: and the batch is one of the equal parts: padding costs as much time as text.
BY_LENGTH = dict.fromkeys(("calls", *COPIED), 4)
#: Kinds of subject that are clips.
CLIPS = ("video", "narration", "decisions_video")
#: Everything that batches are drawn from.
TRAINED = {**SUBJECTS, **UNORDERED, "watch": WATCH, "calls": CALLS, "dictated": DICTATED, "copies": COPIES}
#: Captions are long: they have batches of their own, this share of the image ones, and this canvas (tokens).
CAPTIONS, CAPTION_CANVAS = 0.12, 48

Sample = tuple[Any, list[Question]]


def pixels_of(picture: Image.Image) -> Tensor:
    """A picture as the tower sees it: ``[3, PIXELS, PIXELS]`` fp32 in [-1, 1], resized as the processor does."""
    array = np.asarray(picture.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), dtype=np.float32) / 255
    return torch.from_numpy((array - PIXEL_MEAN) / PIXEL_STD).permute(2, 0, 1)


def frame_times(seconds: float) -> list[float]:
    """When the ``FRAMES`` frames of a clip are taken: the middle of as many equal spans."""
    return [(i + 0.5) * seconds / FRAMES for i in range(FRAMES)]


def draw(
    step: int,
    seed: int,
    *,
    scenes_only: bool,
    packed: bool = False,
    scale: float = 1.0,
    mix: str = "broad",
    causal: bool = False,
) -> tuple[str, list[Sample], int]:
    """Kind, samples and canvas of training step ``step``: the same for the same arguments.

    ``scale`` multiplies the rows, for machines that take larger batches; ``mix`` is a key of ``MIXES``.
    ``causal``: for a causal model: windows of streams may have carriers.
    """
    rng = random.Random(TRAIN_SEEDS[0] + seed * 1_000_003 + step)
    shares = MIXES["scenes" if scenes_only else mix]
    kind = rng.choices(tuple(shares), tuple(shares.values()))[0]
    form = ROWS[kind]
    canvas = rng.choices(*form.canvas)[0]
    if kind == "stream":
        questions = form.packed if packed else 1
        return kind, [*draw_rows(rng, scale, questions, training_clips(), carriers=causal)], canvas
    if kind in DECISIONS:
        count = rng.choice(QUESTIONS)
        most = DECISION_POSITIONS / (CONTEXT_POSITIONS + DECISION_LENGTH * count)
        fitting = max(1, round(scale * min(form.rows, most)))
        return kind, [_decisions(kind, count, rng) for _ in range(fitting)], canvas
    subject = TRAINED[kind]
    tasks = list(SHORT_TASKS if kind == "image" else subject.tasks)
    tasks += [task for task in REPEATED.get(mix, ()) if task in tasks]
    rows, questions = (form.rows / 2, form.packed) if packed and form.packed > 1 else (form.rows, 1)
    if kind == "image" and rng.random() < CAPTIONS:
        tasks, canvas, rows, questions = ["caption"], CAPTION_CANVAS, form.rows, 1
    count, groups = max(1, round(rows * scale)), BY_LENGTH.get(kind, 1)
    samples = [_several(subject, tasks, questions, rng) for _ in range(count * groups)]
    if groups > 1:
        first = rng.randrange(groups) * count
        samples = sorted(samples, key=_characters)[first : first + count]
    return kind, samples, canvas


def _decisions(kind: str, count: int, rng: random.Random) -> Sample:
    """Something to ask about and up to ``count`` typed questions about it."""
    thing = DECISIONS[kind](rng)
    return thing, [prompt_question(thing, each) for each in draw_answered(thing, count, rng)]


def _several(subject: Subject, tasks: list[str], count: int, rng: random.Random) -> Sample:
    """Something to ask about and up to ``count`` different questions about it."""
    thing, first = subject.sample(rng.choice(tasks), rng)
    asked = {first.text: first}
    for _ in range(2 * (count - 1)):
        another = subject.ask(thing, rng.choice(tasks), rng)
        if another is not None and len(asked) < count:
            asked.setdefault(another.text, another)
    return thing, list(asked.values())


def _characters(sample: Sample) -> int:
    """About the length of a row of text."""
    _thing, questions = sample
    asked = (len(q.text) + len(q.answer) for q in questions)
    return sum(asked) + len(str(questions[0].tools)) + len(str(questions[0].turns))


def collate(kind: str, samples: list[Sample], canvas: int, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Tensors of one batch; every answer is padded with end-of-text to ``canvas`` tokens at least."""
    rows = [
        _row(_media_ids(kind, thing, tokenizer), questions, canvas, tokenizer, question_first=kind == "watch")
        for thing, questions in samples
    ]
    longest = max(len(row.ids) for row in rows)

    def padded(values: list[list[Any]], fill: Any) -> Tensor:
        return torch.tensor([v + [fill] * (longest - len(v)) for v in values])

    ids = padded([row.ids for row in rows], tokenizer.eos_token_id)
    visual = torch.tensor([token_id(tokenizer, IMAGE), token_id(tokenizer, VIDEO)])
    seen = padded([[True] * len(row.ids) for row in rows], False)
    pictures = [picture for index, (thing, _questions) in enumerate(samples) for picture in _pictures(thing, index)]
    scenes = [shapes for thing, _questions in samples for shapes in _shapes(thing)]
    changes = [_changes(thing) for thing, _questions in samples if kind not in WITHOUT_MEDIA]
    return Batch(
        kind,
        torch.stack([pixels_of(p) for p in pictures]) if pictures else None,
        kind in CLIPS,
        ids,
        torch.isin(ids, visual) & seen,
        seen,
        kind in DECISIONS or any(len(questions) > 1 for _thing, questions in samples),
        padded([row.question for row in rows], 0),
        padded([row.positions for row in rows], 0),
        padded([row.share for row in rows], 0.0),
        padded([row.block for row in rows], 0),
        SceneLabels.of(scenes) if scenes else None,
        torch.cat(changes) if changes else None,
        sources=padded([row.sources for row in rows], NO_COLUMN) if kind in (*CALLING, *DECISIONS) else None,
        option_labels=padded([row.option_labels for row in rows], False) if kind in DECISIONS else None,
        option_ends=padded([row.option_ends for row in rows], False) if kind in DECISIONS else None,
    )


@dataclass
class _Row:
    ids: list[int]
    question: list[int]
    positions: list[int]
    share: list[float]
    block: list[int]
    sources: list[int] = field(default_factory=list)
    option_labels: list[bool] = field(default_factory=list)
    option_ends: list[bool] = field(default_factory=list)


def _media_ids(kind: str, thing: Any, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """What each media placeholder of the prompt becomes: visual positions, a video's with a time before each frame."""
    if kind in WITHOUT_MEDIA:
        return []
    if isinstance(thing, Window):
        return [window_ids(thing, tokenizer)]
    if not isinstance(thing, Clip):
        return [[token_id(tokenizer, IMAGE)] * VISUAL_TOKENS for _ in _shapes(thing)]
    ids: list[int] = []
    for time in frame_times(thing.seconds):
        ids += tokenizer.encode(FRAME_TIME.format(seconds=int(time)), add_special_tokens=False)
        ids += [token_id(tokenizer, VIDEO)] * FRAME_TOKENS
    return [ids]


def window_ids(window: Window, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The positions of a window's frames: a visual one of each carrier, a label and visual ones of each whole frame."""
    video = token_id(tokenizer, VIDEO)
    ids = [video] * window.carriers
    for index in range(len(window.whole)):
        ids += tokenizer.encode(FRAME_TIME.format(seconds=window.label(index)), add_special_tokens=False)
        ids += [video] * FRAME_TOKENS
    return ids


def _row(
    media: list[list[int]],
    questions: list[Question],
    canvas: int,
    tokenizer: PreTrainedTokenizerFast,
    *,
    question_first: bool = False,
) -> _Row:
    """One row: the media once, then each question with its answer, as the chat template writes them."""
    row = _Row([], [], [], [], [])
    for number, question in enumerate(questions, start=1):
        prompt, shared = _prompt(media, question, tokenizer, question_first)
        answer, share = _answer(question, canvas, tokenizer)
        new = range(len(prompt), len(prompt) + len(answer))
        row.ids += prompt[shared if number > 1 else 0 :] + answer
        row.positions += [*range(shared if number > 1 else 0, new.stop)]
        row.question += [0] * (shared if number == 1 else 0) + [number] * (new.stop - shared)
        row.share += [0.0] * (len(row.ids) - len(row.share) - len(new)) + share
        row.block += [0] * (len(row.ids) - len(row.block) - len(new)) + [i // BLOCK for i in range(len(new))]
        first = len(row.sources)
        added = row.ids[first:]
        if question.decision is None:
            row.sources += _sources(question, added, len(new), first, tokenizer)
            row.option_labels += [False] * len(added)
            row.option_ends += [False] * len(added)
        else:
            options = _option_columns(question.decision, added, tokenizer)
            labels, ends = [label for label, _end in options], [end for _label, end in options]
            right = labels[question.decision.answers.index(question.answer)] + first if labels else NO_COLUMN
            row.sources += [*[NO_COLUMN] * (len(added) - 1), right]
            row.option_labels += [column in labels for column in range(len(added))]
            row.option_ends += [column in ends for column in range(len(added))]
    return row


def _option_columns(decision: Decision, new: list[int], tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """The indices, among the ``new`` tokens of a row, of the label and of the last token of each option."""
    texts = [tokenizer.decode([token]) for token in new]
    owner = [index for index, text in enumerate(texts) for _ in text]
    begin = "".join(texts).rindex(decision.asked)
    return [(owner[begin + label], owner[begin + end]) for label, end in option_offsets(decision)]


def _sources(
    question: Question, new: list[int], answer: int, first: int, tokenizer: PreTrainedTokenizerFast
) -> list[int]:
    """The column of the question that each of the ``new`` tokens of a row is written from, or ``NO_COLUMN``.

    The last ``answer`` of them are the answer's; ``first`` is the column of the first.
    """
    found = [NO_COLUMN] * len(new)
    if question.tools and (spans := value_spans(question)):
        texts = [tokenizer.decode([token]) for token in new]
        prompt = len(new) - answer
        begins = "".join(texts[:prompt]).rindex(question.text)
        spans = [(to, begins + by, length) for to, by, length in spans]
        for to, by in source_tokens(spans, texts[prompt:], texts[:prompt]).items():
            found[prompt + to] = first + by
    return found


def _answer(question: Question, canvas: int, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[float]]:
    """The tokens of an answer and each one's share of the loss; of a typed question it is the slot."""
    if question.decision is not None:
        [candidates] = answer_tokens(tokenizer, [question.decision])
        return [candidates[question.decision.answers.index(question.answer)]], [1.0]
    answer = [*tokenizer.encode(question.answer, add_special_tokens=False), token_id(tokenizer, EOT)]
    padding = max(0, canvas - len(answer))
    total = len(answer) + PADDING_WEIGHT * padding
    share = [1 / total] * len(answer) + [PADDING_WEIGHT / total] * padding
    return answer + [tokenizer.eos_token_id] * padding, share


def _prompt(
    media: list[list[int]], question: Question, tokenizer: PreTrainedTokenizerFast, question_first: bool
) -> tuple[list[int], int]:
    """The prompt's ids with its media in place, and how many of them come before the question's own: of a typed
    question what it is about and the instruction, of one with tools their descriptions."""
    image, video = token_id(tokenizer, IMAGE), token_id(tokenizer, VIDEO)
    shown = [{"type": "video" if video in ids else "image"} for ids in media]
    asked = {"type": "text", "text": question.text}
    turn = {"role": "user", "content": [asked, *shown] if question_first else [*shown, asked]}
    prompt: list[int] = []
    waiting, shared = iter(media), 0
    for token in prompt_ids(tokenizer, [turn, *question.turns], question.tools):
        if token in (image, video):
            prompt += next(waiting)
            shared = len(prompt)
        else:
            prompt.append(token)
    if question.tools:
        shared = prompt.index(token_id(tokenizer, EOT)) + 1
    if question.decision is not None:
        closing = closing_ids(tokenizer)
        shared = len(prompt) - len(closing)
        prompt[shared:] = question_ids(tokenizer, question.decision) + closing
    return prompt, shared


def _pictures(thing: Any, index: int) -> tuple[Image.Image, ...]:
    if isinstance(thing, Scene):
        return (thing.picture,)
    if isinstance(thing, Pair):
        return thing.first.picture, thing.second.picture
    if not isinstance(thing, Clip):
        return ()
    times = frame_times(thing.seconds)
    return through_h264(thing, times) if index % COMPRESSED == 0 else thing.frames(times).pictures


def _shapes(thing: Any) -> list[tuple[Shape, ...]]:
    """The shapes of each picture, for the tower's auxiliary loss; none for clips and text."""
    if isinstance(thing, Scene):
        return [thing.shapes]
    if isinstance(thing, Pair):
        return [thing.first.shapes, thing.second.shapes]
    return []


def _changes(thing: Any) -> Tensor:
    """Labels of the visual tokens of one prompt, for the decoder's auxiliary loss."""
    if isinstance(thing, Window):
        return _window_changes(thing)
    if isinstance(thing, Clip):
        times = frame_times(thing.seconds)
        return change_labels([thing.held(t) for t in times], [int(t) for t in times], pooled=True)
    held = [{(s.row, s.column): (s.kind, s.color) for s in shapes} for shapes in _shapes(thing)]
    return change_labels(held, None, pooled=False)


def _window_changes(window: Window) -> Tensor:
    """The same of a window: the clips' whole frames, each clip apart from the one before it."""
    held, times, ages = [], [], []
    for number, clip in enumerate(window.clips):
        indices = window.indices_of(number)
        if indices:
            seconds = stream_times(clip)
            frames = [window.whole[index][1] for index in indices]
            held.append([clip.held(seconds[frame]) for frame in frames])
            times.append([window.label(index) for index in indices])
            ages.append(None if frames[0] else 0)
    return window_labels(held, times, ages, window.carriers)
