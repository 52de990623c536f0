"""``/v1/constraints``: whether a model can keep a constraint, and an answer obeys it; for editors of schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http.api import required
from mmserve.http.constraints import constrain
from mmserve.http.errors import openai_error
from mmserve.http.fields import Fields
from mmserve.v1 import generation_pb2 as pb

#: The answer of a server that cannot find out without a request.
UNCHECKED = {"valid": None, "warnings": ["the constraint was not checked: this server does that with a request"]}
_NAMES = {"sampling.max_new_tokens": "max_tokens"}


def read(body: dict[str, Any]) -> tuple[pb.GenerateRequest, str | None, dict[str, str]]:
    """The request that would have the constraint of ``body``, the answer that is to be judged by it, if any, and the
    names that errors about fields of the request have.
    """
    fields, found = Fields(body), pb.GenerateRequest()
    found.model = required(fields, "model", str)
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
    """Whether all is well; otherwise with what is wrong, as of the other APIs. ``names``: as of ``read``."""
    return {"valid": True} if error is None else {"valid": False, **openai_error(error, names)}
