"""Older drafts' spellings, written as draft 2020-12 has them."""

from __future__ import annotations

from typing import Any

from mmserve.constraint.compile.shapes import is_number, is_schema
from mmserve.constraint.findings import Refused, child

#: Dialects by ``$schema`` without scheme and fragment: the order in which drafts came.
DIALECTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
#: Keywords by the first draft that has them: an older one ignores them, and so must nobody be surprised.
_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "minContains": 2019,
    "maxContains": 2019,
    "prefixItems": 2020,
    "$dynamicRef": 2020,
}


#: Keywords that these drafts let judge strings, and later ones do not: there they only describe.
_CONTENT = ("contentEncoding", "contentMediaType")
_JUDGE_CONTENT = (6, 7)


def dialect(root: Any) -> int:
    """The draft that ``root`` is written in; the newest where it names none. Raises ``Refused`` for an unknown one."""
    if not isinstance(root, dict) or "$schema" not in root:
        return 2020
    name = root["$schema"]
    bare = name.rstrip("#").partition("://")[2] if isinstance(name, str) else ""
    if bare not in DIALECTS:
        raise Refused.at("/$schema", "$schema", f"must be one of https://{', https://'.join(DIALECTS)}")
    return DIALECTS[bare]


def modern(node: dict[str, Any], draft: int, pointer: str) -> dict[str, Any]:
    """``node`` in the words of draft 2020-12. Raises ``Refused`` where a keyword is of a later draft than ``draft``."""
    for keyword, since in _SINCE.items():
        if keyword in node and draft < since:
            raise Refused.at(
                child(pointer, keyword), keyword, f"is no keyword of the draft that $schema names ({draft})"
            )
    if "$ref" in node and draft <= 7:  # siblings of a reference are ignored there
        return {"$ref": node["$ref"]}
    if draft not in _JUDGE_CONTENT:
        node = {name: value for name, value in node.items() if name not in _CONTENT}
    node = _items(node, draft, pointer)
    if "dependencies" in node:
        node = _dependencies(node, pointer)
    return _exclusive(node) if draft == 4 else node


def _items(node: dict[str, Any], draft: int, pointer: str) -> dict[str, Any]:
    rest = {name: value for name, value in node.items() if name != "additionalItems"}
    if not isinstance(node.get("items"), list):
        return rest if draft < 2020 else node
    if draft == 2020 and "$schema" in node:
        raise Refused.at(child(pointer, "items"), "items", "must be a schema; a row of schemas is prefixItems")
    row = rest.pop("items")
    if row:
        rest["prefixItems"] = row
    if "additionalItems" in node:
        rest["items"] = node["additionalItems"]
    return rest


def _dependencies(node: dict[str, Any], pointer: str) -> dict[str, Any]:
    found = node["dependencies"]
    if not isinstance(found, dict):
        raise Refused.at(child(pointer, "dependencies"), "dependencies", "must be an object")
    names = {name: value for name, value in found.items() if isinstance(value, list)}
    schemas = {name: value for name, value in found.items() if is_schema(value)}
    if len(names) + len(schemas) < len(found):
        raise Refused.at(child(pointer, "dependencies"), "dependencies", "must hold schemas or arrays of names")
    rest = {name: value for name, value in node.items() if name != "dependencies"}
    for keyword, value in (("dependentRequired", names), ("dependentSchemas", schemas)):
        if value and keyword in rest:
            raise Refused.at(child(pointer, "dependencies"), "dependencies", f"cannot stand beside {keyword}")
        if value:
            rest[keyword] = value
    return rest


def _exclusive(node: dict[str, Any]) -> dict[str, Any]:
    """Draft 4's ``exclusiveMinimum: true`` beside ``minimum``."""
    node = dict(node)
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(flag), bool) and node.pop(flag) and is_number(node.get(bound)):
            node[flag] = node.pop(bound)
    return node
