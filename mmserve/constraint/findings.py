"""Findings about a constraint: reasons for a refusal, keywords left out of its grammar, and warnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mmserve.errors import FieldViolation, InvalidArgument


@dataclass(frozen=True)
class Finding:
    """A finding at one point of a constraint: a JSON Pointer (RFC 6901; "" = the whole), the keyword there, and a
    reason."""

    pointer: str
    keyword: str
    reason: str

    def __str__(self) -> str:
        return f"{self.pointer or 'the root'}: {self.keyword}: {self.reason}"


class Refused(Exception):
    """A constraint that was refused; ``findings``: the reasons, at least one."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__("; ".join(map(str, findings)))
        self.findings = findings

    @classmethod
    def at(cls, pointer: str, keyword: str, reason: str) -> Refused:
        """A refusal for one reason."""
        return cls(Finding(pointer, keyword, reason))


def child(pointer: str, *steps: str | int) -> str:
    """The JSON Pointer of ``steps`` below ``pointer``."""
    return pointer + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def as_error(kind: str, findings: Iterable[Finding]) -> InvalidArgument:
    """The error of a request whose ``constraint.<kind>`` was refused, with one violation for each finding."""
    where = f"constraint.{kind}"
    return InvalidArgument(
        *(FieldViolation(f"{where}#{f.pointer}" if f.pointer else where, f"{f.keyword}: {f.reason}") for f in findings)
    )


@dataclass
class Notes:
    """Findings of one constraint while it is rewritten."""

    loose: list[Finding] = field(default_factory=list)  # not enforced; the grammar is wider than the constraint
    warnings: list[Finding] = field(default_factory=list)  # enforced, or without effect; reported to the client

    def cannot(self, pointer: str, keyword: str, reason: str) -> None:
        """Record that ``keyword`` of the schema at ``pointer`` is left out of the grammar."""
        _add(self.loose, Finding(child(pointer, keyword), keyword, reason))

    def warn(self, pointer: str, keyword: str, reason: str) -> None:
        """Record that ``keyword`` of the schema at ``pointer`` has no effect, or possibly not the intended one."""
        _add(self.warnings, Finding(child(pointer, keyword), keyword, reason))


def _add(findings: list[Finding], finding: Finding) -> None:
    if finding not in findings:
        findings.append(finding)
