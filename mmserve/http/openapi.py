"""``/openapi.json``: the OpenAPI description of the HTTP APIs, generated from the tables of ``described.py``."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from mmserve import __version__
from mmserve.http.described import BODIES
from mmserve.http.errors import STATUS
from mmserve.http.field_schemas import Field, Schema

_JSON = "application/json"
#: Short descriptions of the paths with a body; those of docs/api.md are longer.
_POSTS = {
    "/v1/chat/completions": "OpenAI's chat completions",
    "/v1/completions": "OpenAI's completions, of one text or several; with suffix, a gap filled",
    "/v1/fim/completions": "Mistral's fill-in-the-middle",
    "/v1/responses": "Open Responses; nothing is stored",
    "/v1/messages": "Anthropic's messages",
    "/v1/messages/count_tokens": "Tokens of the prompt that a message would have",
    "/tokenize": "vLLM's: the tokens of a text or of a chat's prompt",
    "/detokenize": "vLLM's: the text of tokens",
    "/v1/constraints": "Whether a model can keep a constraint, and an answer obeys it",
    "/v1/decisions": "Typed questions, answered with probabilities in one pass",
    "/v1/systemone": "The same, with SGLang's and vLLM's other names",
}
_GETS = {
    "/v1/models": ("The models that serve", _JSON, ()),
    "/v1/models/{name}": ("One of them", _JSON, ("name",)),
    "/health": ("200 while all models serve, else 503", _JSON, ()),
    "/metrics": ("Prometheus metrics; where tokens are asked for, for tenants with admin = true", "text/plain", ()),
    "/version": ("The version of mmserve", _JSON, ()),
    "/openapi.json": ("This description", _JSON, ()),
}
#: Top-level fields of each response.
_ANSWERS = {
    "/v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/fim/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/responses": ("id", "object", "created_at", "model", "status", "output", "usage"),
    "/v1/messages": ("id", "type", "role", "model", "content", "stop_reason", "usage"),
    "/v1/messages/count_tokens": ("input_tokens",),
    "/tokenize": ("count", "max_model_len", "tokens", "token_strs"),
    "/detokenize": ("prompt",),
    "/v1/constraints": ("valid",),
    "/v1/decisions": ("object", "model", "answers", "usage"),
    "/v1/systemone": ("model", "answers", "usage"),
}
_OF_BODIES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}


def document(models: Sequence[str]) -> dict[str, Any]:
    """The description of a server with these ``models``."""
    paths: dict[str, Any] = {path: {"post": _post(path, models)} for path in BODIES}
    for path, (summary, kind, parameters) in _GETS.items():
        given = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters]
        answers = {
            "200": {"description": "As asked", "content": {kind: {"schema": {}}}},
            **_errors(extra=(HTTPStatus.SERVICE_UNAVAILABLE,)),
        }
        if path == "/health":  # needs no token
            answers = {status: {"description": "", "content": {_JSON: {}}} for status in ("200", "503")}
        paths[path] = {"get": {"summary": summary, "parameters": given, "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mmserve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _post(path: str, models: Sequence[str]) -> dict[str, Any]:
    fields = BODIES[path]
    properties = {name: _nullable(field) for name, field in fields.items()}
    properties["model"] = {"enum": list(models), "description": fields["model"].meaning}
    body = {
        "type": "object",
        "properties": properties,
        "required": [name for name, field in fields.items() if field.required],
        "additionalProperties": path == "/v1/systemone",  # its published schema allows other fields
    }
    answer: Schema = {"type": "object", "required": list(_ANSWERS[path])}
    content = {_JSON: {"schema": answer}}
    if "stream" in fields:
        content["text/event-stream"] = {"schema": {}}  # there is no schema of a whole stream, only of its events
    example = {name: field.example for name, field in fields.items() if field.required}
    return {
        "summary": _POSTS[path],
        "requestBody": {"required": True, "content": {_JSON: {"schema": body, "example": example}}},
        "responses": {"200": {"description": "The answer", "content": content}, **_errors(extra=_OF_BODIES)},
    }


def _nullable(field: Field) -> Schema:
    if field.required:
        return {**field.schema, "description": field.meaning}
    return {"anyOf": [field.schema, {"type": "null"}], "description": field.meaning}


def _errors(extra: Sequence[HTTPStatus]) -> dict[str, Any]:
    statuses = sorted({int(status) for status in (*STATUS.values(), HTTPStatus.MISDIRECTED_REQUEST, *extra)})
    error = {"content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    return {str(status): {"description": _phrase(status), **error} for status in statuses}


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in set(HTTPStatus) else "Client Closed Request"
