"""What a rewriting has to say: findings that depend on the mode, and warnings."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmserve.constraint.findings import Finding, child


@dataclass
class Notes:
    """Collected while one constraint is rewritten."""

    loose: list[Finding] = field(default_factory=list)  # not enforced; the grammar is wider than the constraint
    warnings: list[Finding] = field(default_factory=list)  # enforced or meaningless, but worth saying

    def cannot(self, pointer: str, keyword: str, reason: str) -> None:
        """``keyword`` of the schema at ``pointer`` is left out of the grammar."""
        finding = Finding(child(pointer, keyword), keyword, reason)
        if finding not in self.loose:
            self.loose.append(finding)

    def warn(self, pointer: str, keyword: str, reason: str) -> None:
        """``keyword`` of the schema at ``pointer`` has no effect, or not the one that may be meant."""
        finding = Finding(child(pointer, keyword), keyword, reason)
        if finding not in self.warnings:
            self.warnings.append(finding)
