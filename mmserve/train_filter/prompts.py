"""Training requests of a filter, representative of those that the model will get."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from mmserve.core.request import Diffusion, ImagePart, Message, Part, Request, Sampling, TextPart, VideoPart
from mmserve.lines import read_lines
from mmserve.models.base import LoadedModel
from mmserve.reference.evaluate import canvas, media_files
from mmserve.reference.items import TRAIN_SEEDS
from mmserve.reference.tasks import TASKS, sample

#: Media of the reference tasks by the kind of their subject: (images, videos).
_SHOWS = {"text": (False, False), "video": (False, True)}
#: Block lengths of the requests in turn, 0 = the model's default, so that a filter supports several.
BLOCKS = (0, 0, 16, 64)


def reference_requests(model: LoadedModel, seed: int) -> Iterator[Request]:
    """An endless iterator of items of the bundled models' training data, over all tasks that ``model`` supports in
    turn."""
    sees = model.vision is not None
    watches = model.vision is not None and model.vision.frames_per_video > 0
    tasks = [t for t in TASKS if _fits(TASKS[t], sees=sees, watches=watches)]
    rng = random.Random(seed)
    index = 0
    while True:
        task = tasks[index % len(tasks)]
        thing, question = sample(task, random.Random(rng.choice(TRAIN_SEEDS)))
        media = media_files(task, thing)
        parts: list[Part] = [
            *map(ImagePart, media["images"]),
            *map(VideoPart, media["videos"]),
            TextPart(question.text),
        ]
        yield _request(model, index, tuple(parts), canvas(task), BLOCKS[index // len(tasks) % len(BLOCKS)])
        index += 1


def written_requests(model: LoadedModel, path: Path, new_tokens: int) -> Iterator[Request]:
    """The prompts of a text file, one a line, each with a canvas of ``new_tokens``; raises ``ConfigError`` for an empty
    file."""
    for index, line in enumerate(read_lines(path, "--prompts", str)):
        yield _request(model, index, (TextPart(line),), new_tokens, BLOCKS[index % len(BLOCKS)])


def _fits(kind: str, *, sees: bool, watches: bool) -> bool:
    images, videos = _SHOWS.get(kind, (True, False))
    return (sees or not images) and (watches or not videos)


def _request(model: LoadedModel, index: int, parts: tuple[Part, ...], new_tokens: int, block: int) -> Request:
    own = model.spec.attention_block
    return Request(
        id=f"prompt-{index}",
        model=model.spec.name,
        messages=(Message("user", parts),),
        sampling=Sampling(max_new_tokens=new_tokens),
        diffusion=Diffusion(block_length=0 if own else block),
    )
