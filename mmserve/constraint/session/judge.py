"""Finished answers against the schema itself, for the mode ``validate``."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema_rs

from mmserve.constraint.compile.options import meant
from mmserve.constraint.findings import Finding, child
from mmserve.core.constraint import ConstraintMode, ConstraintSpec, JsonSchema
from mmserve.errors import FailedPrecondition, InvalidArgument

#: Steps back of a pattern that is matched: a hundredth of the library's own, and far more than any useful one takes.
_BACKTRACKS = 10_000


class Judge:
    """Judges answers by a schema that has passed ``constraint.document``: its size and depth are bounded.

    Raises ``InvalidArgument`` where the validator does not take the schema.
    """

    def __init__(self, schema: str) -> None:
        patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKS)
        try:
            self._validator: Any = jsonschema_rs.validator_for(
                json.loads(schema), validate_formats=True, offline=True, pattern_options=patterns
            )
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            raise InvalidArgument.of("constraint.json_schema", f"cannot be checked against: {error}") from error

    def check(self, answer: str) -> None:
        """Raise ``FailedPrecondition``, which names place and keyword, unless ``answer`` is valid JSON under the
        schema."""
        try:
            self._validator.validate(json.loads(answer, parse_float=Decimal))  # no number is too large for JSON
        except jsonschema_rs.ValidationError as error:
            where = child("", *error.instance_path)
            at = Finding(where, str(error.schema_path[-1]) if error.schema_path else "schema", error.message[:300])
            message = f"the answer does not satisfy its schema at {at}; ask again with another seed"
            raise FailedPrecondition(message) from error
        except ValueError as error:
            raise FailedPrecondition(f"the answer is no JSON: {error}") from error
        except ArithmeticError as error:
            raise FailedPrecondition(
                "the answer has a number too large to check; ask again with another seed"
            ) from error


def judge_of(spec: ConstraintSpec, *, exact: bool) -> Judge | None:
    """Who judges answers to ``spec``; None where the grammar does, or nobody shall."""
    if exact or spec.mode is not ConstraintMode.VALIDATE or not isinstance(spec.kind, JsonSchema):
        return None
    return Judge(meant(spec.kind))
