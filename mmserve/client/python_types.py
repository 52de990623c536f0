"""JSON schemas of Python types, narrow enough that pydantic accepts every document under them.

pydantic's own schemas are wider than what pydantic accepts: a ``Decimal`` is any string, a ``timedelta`` any ISO 8601
duration, and models accept unknown members. Needs pydantic.
"""

from __future__ import annotations

import types
import typing
from typing import Any

import typing_extensions
from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from mmserve.client import json_patterns as patterns
from mmserve.client.narrowing import narrowed

Schema = dict[str, Any]


def is_foreign(kind: Any) -> bool:
    """Whether ``kind`` has the methods of a pydantic model, or of a ``TypeAdapter``, but is neither."""
    if isinstance(kind, type):
        return hasattr(kind, "model_json_schema") and not issubclass(kind, BaseModel)
    return hasattr(kind, "json_schema") and not isinstance(kind, TypeAdapter)


def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """The adapter of ``kind``, a Python type. Raises ``TypeError`` for types that pydantic does not support."""
    if isinstance(kind, TypeAdapter):
        return kind
    try:
        try:
            return TypeAdapter(kind)
        except PydanticUserError:
            return TypeAdapter(_rebuilt(kind))
    except RecursionError as error:
        raise TypeError(f"{kind!r} holds itself: make it a typing_extensions.TypedDict, or a model") from error
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise TypeError(f"pydantic has no schema of {kind!r}: {_first_line(error)}") from error


def schema_of(adapter: TypeAdapter[Any]) -> Schema:
    """The JSON schema of the values of ``adapter``. Raises ``TypeError`` if there is none."""
    try:
        return adapter.json_schema(schema_generator=NarrowSchema)
    except (PydanticInvalidForJsonSchema, PydanticUserError) as error:
        raise TypeError(_first_line(error)) from error


class NarrowSchema(GenerateJsonSchema):
    """pydantic's generator of JSON schemas, narrowed to the documents that pydantic accepts."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - as pydantic declares it

    def generate(self, schema: Any, mode: Any = "validation") -> JsonSchemaValue:
        """The narrowed schema of a type."""
        return narrowed(super().generate(schema, mode))

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        """A model has only the members that it declares, unless its configuration allows others."""
        return _closed(super().model_schema(schema))

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        """See ``model_schema``."""
        return _closed(super().dataclass_schema(schema))

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        """See ``model_schema``."""
        return _closed(super().typed_dict_schema(schema))

    def decimal_schema(self, schema: Any) -> JsonSchemaValue:
        """A number with the allowed digits."""
        return patterns.decimal(schema)

    def timedelta_schema(self, schema: Any) -> JsonSchemaValue:
        """An ISO 8601 duration of days and smaller units or, with bounds, a number of seconds."""
        return patterns.timedelta(schema)

    def date_schema(self, schema: Any) -> JsonSchemaValue:
        """A date within the bounds."""
        return patterns.date(schema)

    def datetime_schema(self, schema: Any) -> JsonSchemaValue:
        """A date and time within the bounds, with an offset unless it must be naive."""
        return patterns.datetime(schema)

    def time_schema(self, schema: Any) -> JsonSchemaValue:
        """A time of day."""
        return patterns.time(schema)

    def bytes_schema(self, schema: Any) -> JsonSchemaValue:
        """Text as bytes, or encoded as configured."""
        return patterns.binary(schema, self._config.val_json_bytes)

    def complex_schema(self, schema: Any) -> JsonSchemaValue:
        """A complex number in Python's syntax."""
        return {"type": "string", "pattern": patterns.COMPLEX}

    def str_schema(self, schema: Any) -> JsonSchemaValue:
        """A string that has its minimum length after white space is stripped."""
        made = super().str_schema(schema)
        if schema.get("strip_whitespace") and made.get("minLength") and "pattern" not in made:
            made["pattern"] = patterns.stripped(made["minLength"])
        return made

    def url_schema(self, schema: Any) -> JsonSchemaValue:
        """A URL with one of the allowed schemes."""
        return super().url_schema(schema) | {"format": "", "pattern": patterns.url(schema.get("allowed_schemes"))}

    def multi_host_url_schema(self, schema: Any) -> JsonSchemaValue:
        """A URL with one host."""
        made = super().multi_host_url_schema(schema)
        return made | {"format": "", "pattern": patterns.url(schema.get("allowed_schemes"))}

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        """Members whose names are valid keys."""
        made = super().dict_schema(schema)
        if "patternProperties" in made:
            return made | {"additionalProperties": False}
        keys = self.generate_inner(schema["keys_schema"]) if "keys_schema" in schema else {}
        names = patterns.key_names(keys)
        return made if names is None else made | {"propertyNames": names}


def _closed(made: JsonSchemaValue) -> JsonSchemaValue:
    if made.get("type") == "object" or "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _rebuilt(kind: Any) -> Any:
    """``kind`` with each ``typing.TypedDict`` in it converted to ``typing_extensions``, as pydantic requires."""
    if typing_extensions.is_typeddict(kind):
        names = typing.get_type_hints(kind, include_extras=True)
        fields = {name: _rebuilt(hint) for name, hint in names.items()}
        marked = {
            name: hint
            if typing.get_origin(hint) in _MARKS
            else (typing_extensions.Required if name in kind.__required_keys__ else typing_extensions.NotRequired)[hint]
            for name, hint in fields.items()
        }
        make: Any = typing_extensions.TypedDict
        made = make(kind.__name__, marked)
        made.__doc__, made.__module__ = kind.__doc__, kind.__module__
        if (config := getattr(kind, "__pydantic_config__", None)) is not None:
            made.__pydantic_config__ = config
        return made
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal or not arguments:
        return kind
    if origin is typing.Annotated:
        return typing.Annotated[(_rebuilt(arguments[0]), *arguments[1:])]
    changed = tuple(_rebuilt(argument) for argument in arguments)
    if all(new is old for new, old in zip(changed, arguments, strict=True)):
        return kind
    if origin in (typing.Union, types.UnionType):
        return typing.Union[changed]  # noqa: UP007 - of types that are known only now
    return origin[changed]


_MARKS = (typing_extensions.Required, typing_extensions.NotRequired, typing.Required, typing.NotRequired)
