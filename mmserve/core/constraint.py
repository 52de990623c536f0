"""The constraint of an answer, as given in the request: plain data, without torch and gRPC.

``mmserve.constraint`` compiles a ``ConstraintSpec`` to a grammar, or raises an error with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mmserve.errors import MMServeError


class ConstraintMode(StrEnum):
    """The treatment of parts of a constraint that a grammar cannot enforce exactly."""

    STRICT = "strict"  # reject the constraint
    VALIDATE = "validate"  # enforce a superset, and validate the finished answer
    LENIENT = "lenient"  # ignore these parts, with a warning


class ConstraintSampling(StrEnum):
    """The distribution that constrained answers are drawn from."""

    MASK = "mask"  # the model's distribution over the allowed tokens, at each token
    AWRS = "awrs"  # the same, with an importance weight for each answer
    ASAP = "asap"  # approximates the model's distribution over valid answers from sample to sample; weighted


class SchemaOption(StrEnum):
    """Options for reading a JSON schema, or for writing its documents."""

    UNKNOWN_FORMATS = "unknown_formats"  # unknown formats are ignored
    ONE_OF_AS_ANY_OF = "one_of_as_any_of"
    CLOSED_OBJECTS = "closed_objects"  # no additional properties, unless the schema sets that
    WHITE_SPACE = "white_space"  # up to 32 white space characters between tokens of a document
    EXPONENTS = "exponents"  # numbers without bounds may have an exponent
    ANY_ORDER = "any_order"  # members of objects may come in any order


@dataclass(frozen=True)
class JsonSchema:
    """The answer is a JSON document valid under the schema ``text`` (drafts 4 to 2020-12), with ``options``."""

    text: str
    options: tuple[SchemaOption, ...] = ()


@dataclass(frozen=True)
class Regex:
    """The whole answer matches ``pattern`` (ECMAScript syntax without look-around and back-references)."""

    pattern: str


@dataclass(frozen=True)
class Choice:
    """The answer is exactly one of ``options``."""

    options: tuple[str, ...]


@dataclass(frozen=True)
class Lark:
    """The answer is a sentence of the context-free grammar ``text`` in llguidance's Lark dialect.

    ``strict``: the lines of ``text`` whose schemas are enforced completely, or refused, in the mode ``lenient`` too.
    """

    text: str
    strict: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gbnf:
    """The answer is a sentence of the context-free grammar ``text`` in llama.cpp's GBNF."""

    text: str


@dataclass(frozen=True)
class CallsOrJson:
    """The answer is either tool calls, which match the Lark grammar ``calls``, or a document as in ``JsonSchema``.

    ``openings``: prefixes of texts that are calls. ``strict``: the lines of ``calls`` whose schemas are enforced
    completely, or refused; others are enforced in part. The mode of the constraint applies to the document.
    """

    calls: str
    openings: tuple[str, ...]
    schema: str
    options: tuple[SchemaOption, ...] = ()
    strict: tuple[int, ...] = ()

    @property
    def document(self) -> JsonSchema:
        """The constraint of an answer without calls."""
        return JsonSchema(self.schema, self.options)


ConstraintKind = JsonSchema | Regex | Choice | Lark | Gbnf | CallsOrJson


@dataclass(frozen=True)
class Hole:
    """A hole of a template: ``max_tokens`` positions for a text that obeys ``kind``; None = any text."""

    max_tokens: int
    kind: ConstraintKind | None = None
    mode: ConstraintMode = ConstraintMode.STRICT


@dataclass(frozen=True)
class Template:
    """The answer is exactly these texts, with the holes between them filled.

    There is at least one hole, no text is empty, and texts and holes alternate.
    """

    parts: tuple[str | Hole, ...]


@dataclass(frozen=True)
class ConstraintSpec:
    """One constraint of one request."""

    kind: ConstraintKind | Template
    mode: ConstraintMode = ConstraintMode.STRICT
    sampling: ConstraintSampling = ConstraintSampling.MASK


@dataclass(frozen=True)
class CheckedConstraint:
    """A constraint that can be enforced: its warnings, and the violation by the answer that came with it, if any."""

    warnings: tuple[str, ...]
    wrong: MMServeError | None = None
