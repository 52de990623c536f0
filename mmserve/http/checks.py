"""``/v1/constraints``: whether a model can enforce a constraint, and whether an answer obeys it; for schema editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http.api import model_in
from mmserve.http.constraints import constrain
from mmserve.http.errors import openai_error
from mmserve.http.fields import Fields
from mmserve.v1 import generation_pb2 as pb

#: The response of a server that can check constraints only by running a request.
UNCHECKED = {"valid": None, "warnings": ["the constraint was not checked: this server does that with a request"]}
_NAMES = {"sampling.max_new_tokens": "max_tokens"}


def read(body: dict[str, Any]) -> tuple[pb.GenerateRequest, str | None, dict[str, str]]:
    """A request with the constraint of ``body``, the answer to be checked, if any, and the names of the request's
    fields in errors."""
    fields, found = Fields(body), pb.GenerateRequest()
    found.model = model_in(fields)
    found.messages.add(role=pb.ROLE_USER).parts.add(text=" ")
    if (most := fields.take("max_tokens", int)) is not None:
        if not 0 < most < 1 << 32:
            raise InvalidArgument.of("max_tokens", "is out of range")
        found.sampling.max_new_tokens = most
    names = constrain(fields, found)
    if not found.HasField("constraint"):
        raise InvalidArgument.of("response_format", "is required, or another constraint")
    answer = fields.take("answer", str)
    fields.end()
    return found, answer, {**_NAMES, **names}


def verdict(error: MMServeError | None, names: Mapping[str, str]) -> dict[str, Any]:
    """The result: valid, or the error in the format of the other APIs. ``names``: see ``read``."""
    return {"valid": True} if error is None else {"valid": False, **openai_error(error, names)}
