"""Bodies of HTTP requests, made of what is described of their fields."""

from __future__ import annotations

from typing import Any

from mmserve.http.described import BODIES

#: What a field can only be asked for with.
WITH = {("/v1/chat/completions", "top_logprobs"): {"logprobs": True}}
#: Fields of ``/tokenize`` that are for a text.
OF_TEXTS = ("model", "prompt", "add_special_tokens", "return_token_strs")


def body_with(path: str, name: str) -> dict[str, Any]:
    """The smallest body of ``path`` that has the field."""
    fields = BODIES[path]
    found = {each: field.example for each, field in fields.items() if field.required}
    found |= {"response_format": {"type": "json_object"}} if path == "/v1/constraints" and "guid" not in name else {}
    found |= {} if path != "/v1/constraints" or name != "structured_outputs" else {"response_format": None}
    if path == "/tokenize":
        needed = "prompt" if name in OF_TEXTS else "messages"
        found[needed] = fields[needed].example
    return {**found, **WITH.get((path, name), {}), name: fields[name].example}
