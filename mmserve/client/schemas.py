"""Values of the option ``schema``: conversion to JSON text, and readers of answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)

#: A JSON schema (a mapping or its JSON text, alone or in OpenAI's wrapper), a Python type, or an ``Adapter``.
Schema = Any


class Adapter(Protocol[T_co]):
    """An object with a JSON schema that reads values from JSON, such as ``pydantic.TypeAdapter``."""

    def json_schema(self) -> dict[str, Any]:
        """The JSON schema of the values."""

    def validate_json(self, data: str, /) -> T_co:
        """The value in the JSON text ``data``."""


def schema_text(schema: Schema) -> str:
    """The JSON text of ``schema``. Raises ``TypeError`` or ``ValueError`` if it is not a schema."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"the text is no JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise TypeError("the JSON text must be an object")
    if isinstance(schema, Mapping | bool):
        return json.dumps(_unwrapped(schema), ensure_ascii=False, allow_nan=False)
    return json.dumps(_found(schema)[0](), ensure_ascii=False, allow_nan=False)


def reader(schema: Schema | None) -> Callable[[str], Any] | None:
    """The function that converts an answer to a value for ``schema``; None without one."""
    if schema is None:
        return None
    return json.loads if isinstance(schema, Mapping | str | bool) else _found(schema)[1]


def _unwrapped(schema: Any) -> Any:
    """The schema in OpenAI's wrappers: ``{"name", "schema", "strict"}``, alone, within ``{"type": "json_schema",
    "json_schema": …}``, or beside ``"type": "json_schema"``; any other mapping as it is."""
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("type") == "json_schema":
        inner = schema.get("json_schema", schema)
        if not isinstance(inner, Mapping) or "schema" not in inner:
            raise ValueError("a response format of the type json_schema must have a schema")
        return inner["schema"]
    wrapped = "schema" in schema and "name" in schema and set(schema) <= {"name", "schema", "strict", "description"}
    return schema["schema"] if wrapped else schema


def _found(schema: Any) -> tuple[Callable[[], Any], Callable[[str], Any]]:
    """The functions that return the JSON schema of a Python type, and that read its values."""
    try:
        from mmserve.client import python_types  # needs pydantic, which is optional
    except ImportError as error:
        if (error.name or "").split(".")[0] != "pydantic":
            raise
        raise TypeError(
            "a schema that is a Python type needs pydantic (pip install pydantic); a mapping or JSON text does not"
        ) from error
    if python_types.is_foreign(schema):
        if isinstance(schema, type):
            return schema.model_json_schema, schema.model_validate_json  # type: ignore[attr-defined]
        return schema.json_schema, schema.validate_json
    adapter = python_types.adapter_of(schema)
    return lambda: python_types.schema_of(adapter), adapter.validate_json
