"""Validation of finished answers against their schema, in a separate process.

A validator may need time and memory exponential in the branches of a schema (``anyOf`` of two references to the next
definition, twenty times), and cannot be interrupted in a thread.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

from mmserve.constraint.compile.document import effective_schema
from mmserve.constraint.compile.wire import JsonChild, ReplyTooLong
from mmserve.constraint.limits import ANSWER_SECONDS, CHECK_SECONDS
from mmserve.core.child_process import ChildExited
from mmserve.core.constraint import CallsOrJson, ConstraintMode, ConstraintSpec, JsonSchema
from mmserve.errors import FailedPrecondition, InvalidArgument, Unavailable

_SCHEMA = "constraint.json_schema"
#: Processes that are tried for one question if they are killed from outside.
_ATTEMPTS = 3


class TooMuch(Exception):
    """A question that exceeded its CPU time or memory."""


class ValidatorProcess:
    """A process that validates answers, one question at a time; thread-safe.

    It is started by the first question, and again after a question that ended it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: JsonChild | None = None

    def ask(self, schema: str, answer: str | None) -> dict[str, str]:
        """The reply of ``validation_worker``: empty, or the violation (``wrong``) of the answer, or of the schema
        (``refused``).

        Raises ``TooMuch``, and ``Unavailable`` if no process replies.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                if self._child is None:
                    self._child = JsonChild(
                        "mmserve.constraint.session.validation_worker", str(CHECK_SECONDS), str(2 * ANSWER_SECONDS)
                    )
                try:
                    found: dict[str, str] = self._child.ask({"schema": schema, "answer": answer}, ANSWER_SECONDS)
                    return found
                except TimeoutError as error:
                    self._end()
                    raise Unavailable("the process that checks answers sent nothing; try again later") from error
                except (ChildExited, ReplyTooLong) as error:
                    if not self._end():
                        raise TooMuch from error
        raise Unavailable(f"the process that checks answers was killed {_ATTEMPTS} times; try again later")

    def _end(self) -> bool:
        """Stop the process. Returns whether it had been killed from outside."""
        child, self._child = self._child, None
        if child is None:
            return False
        child.end()
        return child.killed

    def close(self) -> None:
        """Stop the process; a later question starts another one."""
        with self._lock:
            self._end()


#: For finished answers, on decode threads; answers that clients send for checking (``Admission.check``) use another.
ANSWERS = ValidatorProcess()
atexit.register(ANSWERS.close)


class AnswerValidator:
    """Validates answers against a schema read by ``compile.document``, so that its size and depth are bounded.

    ``unchecked``: prefixes of answers that are not documents and need no validation.

    Raises ``InvalidArgument`` if the validator rejects the schema.
    """

    def __init__(self, schema: str, unchecked: tuple[str, ...] = (), process: ValidatorProcess = ANSWERS) -> None:
        self._schema, self._unchecked, self._process = schema, unchecked, process
        try:
            found = process.ask(schema, None)
        except TooMuch as error:
            why = f"no answer can be checked against it in {CHECK_SECONDS:g} s; make it smaller or simpler"
            raise InvalidArgument.of(_SCHEMA, why) from error
        if "refused" in found:
            raise InvalidArgument.of(_SCHEMA, f"cannot be checked against: {found['refused']}")

    def check(self, answer: str) -> None:
        """Raises ``FailedPrecondition``, with pointer and keyword, unless ``answer`` is valid JSON under the schema."""
        if answer.startswith(self._unchecked):
            return
        try:
            found: dict[str, Any] = self._process.ask(self._schema, answer)
        except TooMuch as error:
            why = f"the answer cannot be checked against its schema in {CHECK_SECONDS:g} s; make the schema simpler"
            raise FailedPrecondition(why) from error
        if "wrong" in found:
            raise FailedPrecondition(found["wrong"])


def validator_of(spec: ConstraintSpec, *, exact: bool) -> AnswerValidator | None:
    """The validator of answers to ``spec``; None if the grammar is exact, or if the mode requires no validation."""
    if exact or spec.mode is not ConstraintMode.VALIDATE:
        return None
    match spec.kind:
        case JsonSchema():
            return AnswerValidator(effective_schema(spec.kind))
        case CallsOrJson():
            return AnswerValidator(effective_schema(spec.kind.document), spec.kind.openings)
    return None
