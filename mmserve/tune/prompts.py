"""Prompts for the measurement of policies: from a file, or questions for the bundled models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mmserve.lines import json_object, read_files, read_lines
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.images import schema_asked
from mmserve.reference.tasks import correct

#: Keys of a line of a prompt file.
KEYS = ("text", "images", "videos", "schema", "truth", "max_new_tokens")
#: The questions for the bundled models, in turn: a task, and whether its answer is constrained by a schema.
BUNDLED_ROUND = (
    ("json", True),
    ("count", False),
    ("arithmetic", False),
    ("json", False),
    ("color", False),
    ("caption", False),
    ("json", True),
    ("when", False),
    ("differs", False),
    ("comparison", False),
)
DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request; ``right`` checks an answer if the expected one is known."""

    text: str
    images: list[bytes] = field(default_factory=list)
    videos: list[bytes] = field(default_factory=list)
    schema: dict[str, Any] | None = None
    right: Callable[[str], bool] | None = None
    max_new_tokens: int = DEFAULT_NEW_TOKENS


def bundled_prompts(limit: int, seed: int) -> list[Prompt]:
    """``limit`` questions of ``BUNDLED_ROUND`` that are not in the training data of the bundled models."""
    return [_bundled(*BUNDLED_ROUND[index % len(BUNDLED_ROUND)], index, seed) for index in range(limit)]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a file of JSON lines with the keys ``KEYS``, of which only ``text`` is required.

    ``images`` and ``videos`` are paths, relative to the file's folder. ``truth`` is the expected answer: a string,
    compared without surrounding white space, or another JSON value that the answer must parse to. Raises
    ``ConfigError`` with the line number.
    """
    return read_lines(path, "--prompts", partial(_prompt, path.parent))


def _bundled(task: str, constrained: bool, index: int, seed: int) -> Prompt:
    thing, question = item(task, index, seed)
    media = media_files(task, thing)
    return Prompt(
        text=question.text,
        images=media["images"],
        videos=list(media["videos"]),
        schema=schema_asked(question.text) if constrained else None,
        right=lambda answer: correct(question, answer),
        max_new_tokens=canvas(task),
    )


def _prompt(folder: Path, line: str) -> Prompt:
    data = json_object(line, KEYS)
    if not isinstance(data["text"], str):
        raise ValueError("'text' must be a string")
    schema, tokens = data.get("schema"), data.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    if schema is not None and not isinstance(schema, dict):
        raise ValueError("'schema' must be a JSON schema, an object")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"'max_new_tokens' must be a whole number of at least 1, not {tokens!r}")
    return Prompt(
        text=data["text"],
        images=read_files(data, "images", folder),
        videos=read_files(data, "videos", folder),
        schema=schema,
        right=_judge(data["truth"]) if "truth" in data else None,
        max_new_tokens=tokens,
    )


def _judge(truth: Any) -> Callable[[str], bool]:
    if isinstance(truth, str):
        return lambda answer: answer.strip() == truth.strip()

    def right(answer: str) -> bool:
        try:
            return bool(json.loads(answer) == truth)
        except ValueError:
            return False

    return right
