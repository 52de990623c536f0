"""What suites of schemas come to: one schema at a time, and all of a suite."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_EXAMPLES = 400  # of each kind in the report


@dataclass
class Found:
    """What one schema came to; without ``refusal`` it is admitted."""

    suite: str
    name: str
    refusal: str = ""  # the first reason, and the keyword that has it
    keyword: str = ""
    valid: int = 0  # instances
    invalid: int = 0
    valid_rejected: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    valid_respelled: int = 0  # accepted with members in the order of the schema and numbers without exponents only
    answers: int = 0  # drawn from the grammar
    answers_invalid: list[str] = field(default_factory=list)


@dataclass
class Counts:
    """What the schemas of one suite came to."""

    suite: str
    schemas: int = 0
    admitted: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # schemas by the first keyword that was refused
    examples: dict[str, list[str]] = field(default_factory=lambda: {"unsound": [], "refused": [], "rejecting": []})

    def add(self, found: Found) -> None:
        """Count one schema."""
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
        """The figures of the report."""
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
