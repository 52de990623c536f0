"""Public suites of JSON schemas with instances, read from files downloaded by the user, and counts of results.

MaskBench (github.com/guidance-ai/jsonschemabench, ``maskbench/data``): a file is one object with ``schema`` and
``tests``. JSON-Schema-Test-Suite (github.com/json-schema-org/JSON-Schema-Test-Suite, ``tests/draft*``): a file is a
list of such objects, and its folder gives the draft.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError

#: ``$schema`` by folder of JSON-Schema-Test-Suite, for the supported drafts.
_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@dataclass(frozen=True)
class Case:
    """The location of a schema and its instances; ``name`` is the file's and, in a list, the case's number."""

    suite: str
    name: str
    path: Path
    number: int | None = None  # index in the file's list
    draft: str | None = None  # for schemas without ``$schema``

    def read(self) -> tuple[Any, tuple[tuple[Any, bool], ...]]:
        """The schema, and pairs of an instance and whether it is valid; read at each call, as a suite may be large."""
        content = json.loads(self.path.read_text())
        group = content if self.number is None else content[self.number]
        schema = group["schema"]
        if self.draft is not None and isinstance(schema, dict):
            schema = {"$schema": self.draft, **schema}
        return schema, _tests(group["tests"])


def read(folder: Path, sample: int, seed: int) -> list[Case]:
    """The cases of all files in ``folder`` and below, or the first ``sample`` of each suite (0 = all), in random order,
    so that any prefix is a fair sample of the suite.

    Raises ``ConfigError`` if there are none.
    """
    suites: dict[str, list[Case]] = {}
    for path in sorted(folder.rglob("*.json")):
        for case in _cases(path, path.relative_to(folder)):
            suites.setdefault(case.suite, []).append(case)
    if not suites:
        raise ConfigError(
            f"{folder} has no schemas with instances: fetch github.com/guidance-ai/jsonschemabench or "
            "github.com/json-schema-org/JSON-Schema-Test-Suite and give its folder as --data"
        )
    chance = random.Random(seed)
    for name in sorted(suites):
        chance.shuffle(suites[name])
    return [case for name in sorted(suites) for case in suites[name][: sample or None]]


def _cases(path: Path, name: Path) -> Iterator[Case]:
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return
    match content:
        case {"schema": _, "tests": [*_]}:
            yield Case("MaskBench", str(name), path)
        case [{"schema": _, "tests": _}, *_]:
            draft = next((_DRAFTS[part] for part in path.parts if part in _DRAFTS), None)
            if draft is None:
                return
            for number in range(len(content)):
                yield Case("JSON-Schema-Test-Suite", f"{name}#{number}", path, number, draft)


def _tests(tests: list[Any]) -> tuple[tuple[Any, bool], ...]:
    judged = [test for test in tests if isinstance(test, dict) and test.keys() >= {"data", "valid"}]
    return tuple((test["data"], bool(test["valid"])) for test in judged)


_EXAMPLES = 400  # of each kind in the report


@dataclass
class Found:
    """The result of one schema; an empty ``refusal`` = admitted."""

    suite: str
    name: str
    refusal: str = ""  # the first reason, with its keyword
    keyword: str = ""
    valid: int = 0  # instances
    invalid: int = 0
    valid_rejected: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    valid_respelled: int = 0  # accepted only if in schema order and without exponents
    answers: int = 0  # generated from the grammar
    answers_invalid: list[str] = field(default_factory=list)


@dataclass
class Counts:
    """The results of the schemas of one suite."""

    suite: str
    schemas: int = 0
    admitted: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # schemas by the first rejected keyword
    examples: dict[str, list[str]] = field(default_factory=lambda: {"unsound": [], "refused": [], "rejecting": []})

    def add(self, found: Found) -> None:
        """Count the result of one schema."""
        self.schemas += 1
        if found.refusal:
            self.refusals[found.keyword] += 1
            self.examples["refused"].append(f"{found.name}: {found.refusal}")
            return
        self.admitted += 1
        for name in ("valid", "invalid", "valid_respelled", "answers"):
            self.numbers[name] += getattr(found, name)
        for name, kind in (
            ("valid_rejected", "rejecting"),
            ("invalid_accepted", "unsound"),
            ("answers_invalid", "unsound"),
        ):
            self.numbers[name] += len(getattr(found, name))
            self.examples[kind] += [f"{found.name}: {text}" for text in getattr(found, name)]

    def __str__(self) -> str:
        """A line of progress."""
        return (
            f"{self.suite}: {self.admitted} of {self.schemas} admitted, {len(self.examples['unsound'])} unsound, "
            f"{self.numbers['valid_rejected']} of {self.numbers['valid']} valid instances rejected"
        )

    def row(self) -> dict[str, Any]:
        """The columns of the report."""
        names = ("invalid", "invalid_accepted", "valid", "valid_rejected", "valid_respelled", "answers")
        return {
            "task": self.suite,
            "schemas": self.schemas,
            "admitted": self.admitted,
            "admitted_share": round(self.admitted / self.schemas, 4),
            **{name: self.numbers[name] for name in (*names, "answers_invalid")},
            "valid_rejected_share": round(self.numbers["valid_rejected"] / max(1, self.numbers["valid"]), 4),
            "refusals": dict(self.refusals.most_common()),
            **{kind: examples[:_EXAMPLES] for kind, examples in self.examples.items()},
        }
