"""Narrows pydantic's JSON schemas to the documents that pydantic accepts: formats, keys, unions, JSON in strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mmserve.client.json_patterns import DAY, FORMATS, UNKNOWABLE

Schema = dict[str, Any]

_MAPS = ("properties", "$defs", "patternProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "contentSchema", "not")
_CHARACTER = "[A-Za-z0-9 _.,:\\-]"
#: Parts of a pattern that may match a character that JSON strings escape.
_UNSAFE = re.compile(r'"|\\(?![.+\-$^])|\[\^|(?<!\\)\.')
#: The pattern of ``pydantic.ByteSize``, which allows any word as unit.
_BYTE_SIZE = r"^\s*(\d*\.?\d+)\s*(\w+)?"
#: Maximum items of an array, and levels of references, in JSON within a string.
_MOST_ITEMS, _MOST_LEVELS = 8, 8


def narrowed(root: Schema) -> Schema:
    """``root`` without values that pydantic rejects. Raises ``TypeError`` if there is no such schema."""
    return _Narrowing(root).schema(root)


class _Narrowing:
    def __init__(self, root: Schema) -> None:
        self._definitions: Mapping[str, Any] = root.get("$defs", {})
        self._tags: dict[str, set[str]] = {}  # by definition: the members that distinguish it in unions
        self._find_tags(root)

    def schema(self, node: Any) -> Any:
        """The schema ``node``, narrowed."""
        if not isinstance(node, dict):
            return node
        made: Schema = dict(node)
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                made[key] = {name: self.schema(value) for name, value in node[key].items()}
        for key in _LISTS:
            if key in node:
                made[key] = [self.schema(value) for value in node[key]]
        for key in _SINGLE:
            if key in node:
                made[key] = self.schema(node[key])
        for name, members in self._tags.items():
            if "$defs" in made and name in made["$defs"]:
                made["$defs"][name] = _requiring(made["$defs"][name], members)
        if "discriminator" in made:
            made.pop("discriminator")
            made["anyOf"] = made.pop("oneOf", made.get("anyOf", []))
        if made.get("uniqueItems"):
            if made.get("minItems", 0) < 2:
                made.pop("uniqueItems")  # pydantic accepts repeated items for a set
            elif "enum" in (items := self._resolved(made.get("items"))):
                made["items"] = items  # the server enumerates sets of few values
        if made.get("contentMediaType") == "application/json":
            return {"type": "string", "pattern": f"^{self._text(made.get('contentSchema', {}), 0)}$"}
        if made.get("pattern") == _BYTE_SIZE:
            return {"type": "string", "pattern": "^[0-9]{1,9} ?(?:B|KB|MB|GB|KiB|MiB|GiB)$"}
        if isinstance(made.get("format"), str) and made.get("type") == "string":
            made = _formatted(made)
        if "propertyNames" in made:
            made = self._named(made)
        return made

    def _find_tags(self, node: Any) -> None:
        if isinstance(node, list):
            for value in node:
                self._find_tags(value)
        elif isinstance(node, dict):
            tag = node.get("discriminator")
            if isinstance(tag, dict) and "propertyName" in tag:
                for value in (*tag.get("mapping", {}).values(), *(part.get("$ref") for part in node.get("oneOf", ()))):
                    if isinstance(value, str) and value.startswith("#/$defs/"):
                        self._tags.setdefault(value.removeprefix("#/$defs/"), set()).add(tag["propertyName"])
            for value in node.values():
                self._find_tags(value)

    def _named(self, node: Schema) -> Schema:
        """``node`` with the schema of its member names as properties or patterns."""
        names = self._resolved(node["propertyNames"])
        value = node.get("additionalProperties", True)
        made = {key: kept for key, kept in node.items() if key != "propertyNames"}
        if "enum" in names or "const" in names:
            keys = names.get("enum", [names.get("const")])
            return made | {"properties": dict.fromkeys(map(str, keys), value), "additionalProperties": False}
        if "pattern" in names:
            return made | {"patternProperties": {names["pattern"]: value}, "additionalProperties": False}
        if "format" in names:  # a format that the server has a pattern for; member names cannot have one
            return made | {"patternProperties": {_pattern_of(names["format"]): value}, "additionalProperties": False}
        return node

    def _resolved(self, node: Any) -> Schema:
        while isinstance(node, dict) and "$ref" in node:
            node = self.schema(self._definitions[node["$ref"].removeprefix("#/$defs/")])
        return node if isinstance(node, dict) else {}

    def _text(self, node: Any, level: int) -> str:
        """A regular expression of JSON texts under the narrowed schema ``node``: a simple subset."""
        if level > _MOST_LEVELS:
            raise TypeError("a JSON string of a type that refers to itself cannot be enforced")
        node = self._resolved(node)
        if "enum" in node or "const" in node:
            return _any_of(_escaped(json.dumps(value)) for value in node.get("enum", [node.get("const")]))
        if "anyOf" in node:
            return _any_of(self._text(part, level + 1) for part in node["anyOf"])
        if "allOf" in node and len(node["allOf"]) == 1:
            return self._text(node["allOf"][0], level + 1)
        if unknown := {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} & set(node):
            raise TypeError(f"{', '.join(sorted(unknown))} cannot be enforced within a JSON string")
        match node.get("type"):
            case None if not set(node) & {"properties", "items", "pattern"}:
                return rf'(?:null|true|false|(?:0|-?[1-9][0-9]{{0,14}})|"{_CHARACTER}{{0,64}}")'
            case "null":
                return "null"
            case "boolean":
                return "(?:true|false)"
            case "integer":
                return "(?:0|-?[1-9][0-9]{0,14})"
            case "number":
                return r"(?:-?(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,6})?)"
            case "string":
                return self._string(node)
            case "array":
                return self._array(node, level)
            case "object":
                return self._object(node, level)
        raise TypeError("a JSON string of this type cannot be enforced")

    def _string(self, node: Schema) -> str:
        pattern = node.get("pattern") or (_pattern_of(node["format"]) if "format" in node else "")
        if not pattern:
            least, most = node.get("minLength", 0), node.get("maxLength", max(64, node.get("minLength", 0)))
            return rf'"{_CHARACTER}{{{least},{most}}}"'
        if not (pattern.startswith("^") and pattern.endswith("$")) or _UNSAFE.search(pattern):
            raise TypeError("a pattern within a JSON string cannot be enforced")
        return rf'"(?:{pattern[1:-1]})"'

    def _array(self, node: Schema, level: int) -> str:
        if "prefixItems" in node:
            parts = [self._text(item, level + 1) for item in node["prefixItems"]]
            return rf"\[{', ?'.join(parts)}\]"
        item = self._text(node.get("items", {}), level + 1)
        least, most = node.get("minItems", 0), node.get("maxItems", max(_MOST_ITEMS, node.get("minItems", 0)))
        if most < 1:
            return r"\[\]"
        some = rf"{item}(?:, ?{item}){{{max(0, least - 1)},{most - 1}}}"
        return rf"\[{some}\]" if least else rf"\[(?:{some})?\]"

    def _object(self, node: Schema, level: int) -> str:
        required = [name for name in node.get("properties", {}) if name in node.get("required", ())]
        if not required and isinstance(node.get("additionalProperties"), dict):
            value = self._text(node["additionalProperties"], level + 1)
            pair = rf'"{_CHARACTER}{{1,16}}": ?{value}'
            return rf"\{{(?:{pair})?\}}"
        members = [
            rf"{_escaped(json.dumps(name))}: ?{self._text(node['properties'][name], level + 1)}" for name in required
        ]
        return rf"\{{{', ?'.join(members)}\}}"


def _formatted(node: Schema) -> Schema:
    """``node`` with the format of its strings as a pattern, if pydantic differs from the standard."""
    name = node["format"]
    if name in UNKNOWABLE:
        raise TypeError(f"values of the format {name} are {UNKNOWABLE[name]}, which the server does not know")
    if name and name not in FORMATS:
        return node
    made = {key: value for key, value in node.items() if key not in ("format", "writeOnly")}
    return made | {"pattern": FORMATS[name]} if FORMATS.get(name) else made


def _pattern_of(name: str) -> str:
    """The pattern of a format supported by the server, for keys and JSON in strings."""
    found = {
        "date": f"^{DAY}$",
        "date-time": f"^{DAY}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z$",
        "uuid": "^[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        "ipv4": FORMATS["ipv4interface"].split("/")[0] + "$",
        "ipv6": FORMATS["ipv6interface"].split("/")[0] + "$",
    }.get(name)
    if found is None:
        raise TypeError(f"strings of the format {name} cannot be enforced as keys or within JSON strings")
    return found


def _requiring(node: Schema, members: set[str]) -> Schema:
    required = list(node.get("required", ()))
    return node | {"required": required + sorted(members - set(required) & set(node.get("properties", members)))}


def _any_of(forms: Any) -> str:
    return f"(?:{'|'.join(forms)})"


def _escaped(text: str) -> str:
    """``text`` as a regular expression in ECMAScript's syntax."""
    return re.sub(r"([\\^$.*+?()\[\]{}|])", r"\\\1", text)
