"""What an answer must look like, as the request states it: plain data, neither torch nor gRPC.

``mmserve.constraint`` turns a ``ConstraintSpec`` into a grammar, or refuses it with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mmserve.errors import MMServeError


class ConstraintMode(StrEnum):
    """What to do with the parts of a constraint that no grammar can enforce exactly."""

    STRICT = "strict"  # refuse them
    VALIDATE = "validate"  # enforce something wider and check the finished answer
    LENIENT = "lenient"  # ignore them, with a warning


class ConstraintSampling(StrEnum):
    """What the drawn answers are draws from."""

    MASK = "mask"  # at each token the model's distribution over the tokens allowed there
    AWRS = "awrs"  # the same, and each answer has a weight that corrects it
    ASAP = "asap"  # the model's distribution over valid answers, approached from sample to sample; weighted, too


class SchemaOption(StrEnum):
    """How a JSON schema is read, or its documents are written, otherwise than by default."""

    UNKNOWN_FORMATS = "unknown_formats"  # a format that is unknown has no effect
    ONE_OF_AS_ANY_OF = "one_of_as_any_of"
    CLOSED_OBJECTS = "closed_objects"  # objects have declared properties only, where the schema leaves it open
    WHITE_SPACE = "white_space"  # up to 32 spaces, tabs and line ends between the parts of a document
    EXPONENTS = "exponents"  # numbers without bounds may have an exponent
    ANY_ORDER = "any_order"  # of the members of objects


@dataclass(frozen=True)
class JsonSchema:
    """The answer is a JSON document valid under the schema ``text`` (drafts 4 to 2020-12), under ``options``."""

    text: str
    options: tuple[SchemaOption, ...] = ()


@dataclass(frozen=True)
class Regex:
    """The whole answer matches ``pattern`` (ECMAScript syntax without look-around and back-references)."""

    pattern: str


@dataclass(frozen=True)
class Choice:
    """The answer is one of ``options``, letter for letter."""

    options: tuple[str, ...]


@dataclass(frozen=True)
class Lark:
    """The answer is a sentence of the context-free grammar ``text`` in llguidance's Lark dialect."""

    text: str


@dataclass(frozen=True)
class Gbnf:
    """The answer is a sentence of the context-free grammar ``text`` in llama.cpp's GBNF."""

    text: str


@dataclass(frozen=True)
class CallsOrJson:
    """The answer calls tools, and is then a sentence of the Lark grammar ``calls``, or is a document as of
    ``JsonSchema``.

    ``openings``: how texts begin that are calls. ``lenient``: whether schemas in ``calls`` are enforced as far as that
    can be done; the mode of the constraint is the document's.
    """

    calls: str
    openings: tuple[str, ...]
    schema: str
    options: tuple[SchemaOption, ...] = ()
    lenient: bool = False

    @property
    def document(self) -> JsonSchema:
        """What the answer is without calls."""
        return JsonSchema(self.schema, self.options)


ConstraintKind = JsonSchema | Regex | Choice | Lark | Gbnf | CallsOrJson


@dataclass(frozen=True)
class Hole:
    """A gap of a template: ``max_tokens`` positions for a text that obeys ``kind``; None = any text."""

    max_tokens: int
    kind: ConstraintKind | None = None
    mode: ConstraintMode = ConstraintMode.STRICT


@dataclass(frozen=True)
class Template:
    """The answer is these texts, letter for letter, with the holes between them filled.

    There is one hole at least, no text is empty, and texts and holes take turns.
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
    """A constraint that can be kept: its warnings, and what is wrong with the answer that came with it, if anything."""

    warnings: tuple[str, ...]
    wrong: MMServeError | None = None
