"""The child process that validates answers; imports no torch.

Run as ``python -m mmserve.constraint.session.validation_worker SECONDS PATIENCE``. It handles questions until its input
ends. A question that takes more than ``SECONDS`` of CPU time ends the process by SIGPROF, one that takes more than
``PATIENCE`` seconds of wall time by SIGALRM, and one that needs more than ``limits.CHILD_BYTES`` by an allocation
failure.
"""

from __future__ import annotations

import json
import resource
import sys
from decimal import Decimal
from functools import lru_cache
from typing import Any

import jsonschema_rs

from mmserve.constraint.compile import wire
from mmserve.constraint.findings import Finding, child
from mmserve.constraint.limits import CHILD_BYTES
from mmserve.core.timers import accept_timers, limited

#: Backtracking limit of a pattern match: a hundredth of the library's default, far above what useful patterns need.
_BACKTRACKS = 10_000


def serve() -> None:
    """Handle questions from standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds, patience = map(float, sys.argv[1:])
    accept_timers()
    while (message := wire.read(sys.stdin.buffer)) is not None:
        with limited(seconds, patience):
            reply = answered(message["schema"], message["answer"])
        sys.stdout.buffer.write(wire.packed(reply))
        sys.stdout.buffer.flush()


def answered(schema: str, answer: str | None) -> dict[str, str]:
    """The violation of ``answer``, if given (``wrong``); or the reason why ``schema`` is ``refused``; or empty."""
    try:
        validator = _validator(schema)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        return {"refused": str(error)[:300]}
    wrong = None if answer is None else _wrong(validator, answer)
    return {} if wrong is None else {"wrong": wrong}


@lru_cache(maxsize=1)
def _validator(schema: str) -> Any:
    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKS)
    return jsonschema_rs.validator_for(
        json.loads(schema), validate_formats=True, offline=True, pattern_options=patterns
    )


def _wrong(validator: Any, answer: str) -> str | None:
    try:
        validator.validate(json.loads(answer, parse_float=Decimal))  # no number overflows
    except jsonschema_rs.ValidationError as error:
        where = child("", *error.instance_path)
        at = Finding(where, str(error.schema_path[-1]) if error.schema_path else "schema", error.message[:300])
        return f"the answer does not satisfy its schema at {at}; ask again with another seed"
    except RecursionError:
        return "the answer is nested too deep to be checked"
    except ValueError as error:
        return f"the answer is no JSON: {error}"
    except ArithmeticError:
        return "the answer has a number too large to check; ask again with another seed"
    return None


if __name__ == "__main__":
    serve()
