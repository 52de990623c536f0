"""Constraints that are checked while they are written, without a request."""

from __future__ import annotations

from mmserve.constraint.admission import Admission
from mmserve.constraint.compile.options import meant
from mmserve.constraint.session.judge import Judge
from mmserve.core.constraint import CheckedConstraint, ConstraintSpec, JsonSchema
from mmserve.errors import FailedPrecondition, InvalidArgument


def checked(
    admission: Admission, spec: ConstraintSpec, budget: int, cache: str = "", answer: str | None = None
) -> CheckedConstraint:
    """Whether answers of ``budget`` tokens can obey ``spec``, and whether ``answer`` is valid under its JSON schema.

    ``cache``: as of ``Admission.admit``. Raises what that raises, and ``InvalidArgument`` for an answer to another kind
    of constraint.
    """
    [session] = admission.admit(spec, budget, cache=cache)
    wrong: FailedPrecondition | None = None
    if answer is not None:
        if not isinstance(spec.kind, JsonSchema):
            raise InvalidArgument.of("answer", "can be judged by a JSON schema alone")
        try:
            Judge(meant(spec.kind)).check(answer)
        except FailedPrecondition as error:
            wrong = error.with_traceback(None)
    return CheckedConstraint(session.warnings, wrong)
