"""References of a schema document, rewritten as JSON Pointers into it, and their targets.

JSON Schema 2020-12, sections 8.2 and 9.2: ``$id`` makes a schema a resource with its own URI, against which its
references are resolved; ``$anchor`` names a schema within its resource. Older drafts use ``id`` and ``$id: "#name"``.
URIs are resolved and normalised (RFC 3986, 5.2 and 6.2), so that equal URIs are equal texts. ``located`` rewrites
references by URI, anchor or dynamic anchor; ``References`` looks up the targets of JSON Pointers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from mmserve.constraint.compile.keywords import Schema, dialect, is_schema, objects_within
from mmserve.constraint.findings import Refused, child

_MOST_REFERENCES = 2_000
#: The base URI of a document without its own.
NO_COLUMN = "json-schema:///"
_CHARACTERS = re.compile(r"(?:[A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")
_PARTS = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?]*))?([^?]*)(\?.*)?")
_INDEX = re.compile("0|[1-9][0-9]{0,5}")  # of an array (RFC 6901)
_PORTS = {"http": "80", "https": "443"}
#: Keywords whose value is a schema, an array of schemas, or an object of schemas.
ONE = frozenset({"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"})
ONE |= {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
ROW = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
NAMED = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
#: The first draft of those keywords that draft 4 does not have.
_SINCE = {"if": 7, "then": 7, "else": 7, "$defs": 2019, "contentSchema": 2019, "dependentSchemas": 2019}
_SINCE |= {"unevaluatedItems": 2019, "unevaluatedProperties": 2019, "prefixItems": 2020}
#: URIs of meta-schemas, which documents may not use as their own.
_META = re.compile(r"https?://json-schema\.org/draft[-/]")


def resolved(base: str | None, reference: str) -> str | None:
    """The URI of ``reference``, which has no fragment, relative to ``base`` (a result of this function, or
    ``NO_COLUMN``).

    None if there is none: ``reference`` is not a URI reference (or has an IP literal, which is not supported), or it is
    relative to a base without hierarchy, such as a URN, or to None.
    """
    if not _CHARACTERS.fullmatch(reference) or (found := _PARTS.fullmatch(reference)) is None:
        return None
    scheme, host, path, query = found.groups()
    if scheme is None:
        above = _PARTS.fullmatch(base) if base is not None else None
        if above is None or above[2] is None or ":" in path.split("/")[0]:
            return None
        scheme = above[1]
        if host is None:
            host = above[2]
            if not path:
                path, query = above[3], query if query is not None else above[4]
            elif not path.startswith("/"):
                path = (above[3] or "/").rpartition("/")[0] + "/" + path
    scheme, path = scheme.lower(), _plain(path)
    if host is None:
        return f"{scheme}:{path}{_plain(query or '')}" if not path.startswith("/") else None
    return f"{scheme}://{_host(scheme, host)}{_without_dots(path or '/')}{_plain(query or '')}"


def _host(scheme: str, text: str) -> str:
    user, at, place = text.rpartition("@")
    name, _, port = place.partition(":")
    shown = f":{port}" if port and port != _PORTS.get(scheme) else ""
    return _plain(user) + at + _plain(_plain(name).lower()) + shown


def _plain(text: str) -> str:
    """``text`` without unnecessary percent-encoding, and with the rest in upper case."""

    def one(escape: re.Match[str]) -> str:
        char = chr(int(escape[1], 16))
        return char if char.isascii() and (char.isalnum() or char in "-._~") else escape[0].upper()

    return re.sub(r"%([0-9A-Fa-f]{2})", one, text)


def _without_dots(path: str) -> str:
    steps: list[str] = []
    parts = path.split("/")[1:]
    for i, step in enumerate(parts):
        if step == "..":
            del steps[-1:]
        elif step != ".":
            steps.append(step)
        if step in (".", "..") and i == len(parts) - 1:
            steps.append("")
    return "/" + "/".join(steps)


class _Place(NamedTuple):
    node: dict[str, Any]
    pointer: str
    base: str | None  # the URI of its resource, if it has one
    root: str  # the pointer of its resource


def located(root: Any) -> Any:
    """``root`` (of ``read_schema``) with every reference to a schema in it as a JSON Pointer.

    Other references are unchanged, and so are those whose target would change its meaning: schemas with their own
    dialect, and dynamic references with several possible anchors. Raises ``Refused`` for an unknown dialect, and for a
    reference that depends on a URI that two schemas claim.
    """
    draft = dialect(root)
    places = list(_places(root, draft))
    if not any(_needs_rewriting(place, draft) for place in places):
        return root
    names = _Names(places, draft)
    return _rewritten(root, {place.pointer: names.own(place) for place in places}, "")


def obscure(root: Any) -> frozenset[str]:
    """The pointers of objects that are not schemas of any keyword, and that have their own URI or are below such an
    object.

    Implementations differ about the base URI of references there, so no reference may lead there.
    """
    draft = dialect(root)
    return frozenset(_obscure(root, draft, {place.pointer: place.root for place in _places(root, draft)}, "", False))


def _obscure(node: Any, draft: int, roots: dict[str, str], pointer: str, named: bool) -> Iterator[str]:
    if isinstance(node, dict):
        if pointer in roots:
            named = roots[pointer] != ""
        elif named := named or _is_named(node, draft):
            yield pointer
        for name, value in node.items():
            yield from _obscure(value, draft, roots, child(pointer, name), named)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _obscure(value, draft, roots, child(pointer, i), named)


def _identity(draft: int) -> str:
    return "id" if draft == 4 else "$id"


def _is_named(node: dict[str, Any], draft: int) -> bool:
    return isinstance(node.get(_identity(draft)), str)


def _needs_rewriting(place: _Place, draft: int) -> bool:
    """Whether a schema has a name, or a reference other than a JSON Pointer into the root."""
    node = place.node
    reference = node.get("$ref", "#")
    pointed = not isinstance(reference, str) or reference == "#" or reference.startswith("#/")
    named = bool(place.pointer) and not {"$id", _identity(draft)}.isdisjoint(node)
    return not pointed or named or place.root != "" or not {"$dynamicRef", "$recursiveRef"}.isdisjoint(node)


class _Names:
    """The schemas of a document by URI and anchor; None if several schemas claim one."""

    def __init__(self, places: list[_Place], draft: int) -> None:
        self._draft, self._dialect = draft, places[0].node.get("$schema")
        self._resources: dict[str, str] = {}
        self._claimed: dict[str, Refused] = {}  # URIs of several schemas: ambiguous, so references to them are refused
        self._anchors: dict[tuple[str, str], str | None] = {}
        self._dynamic: dict[str, list[str]] = {}
        self._recursive = any(place.node.get("$recursiveAnchor") is True for place in places)
        for place in places:
            if place.pointer == place.root and place.base is not None:
                self._found(place, place.base)
            for name in _anchors(place.node, draft):
                own = place.root, name
                self._anchors[own] = place.pointer if self._anchors.get(own, place.pointer) == place.pointer else None
            if draft == 2020 and isinstance(dynamic := place.node.get("$dynamicAnchor"), str):
                self._dynamic.setdefault(dynamic, []).append(place.pointer)

    def _found(self, place: _Place, uri: str) -> None:
        keyword = _identity(self._draft)
        if place.pointer and _META.match(uri):
            raise Refused.at(child(place.pointer, keyword), keyword, "must not be the URI of a meta-schema")
        if self._resources.setdefault(uri, place.pointer) != place.pointer:
            refusal = Refused.at(child(place.pointer, keyword), keyword, "is another schema's URI too")
            self._claimed.setdefault(uri, refusal)

    def own(self, place: _Place) -> dict[str, Any]:
        """Members of ``place`` that are replaced; None for one that is removed."""
        node, made = place.node, dict[str, Any]()
        reference = node.get("$ref")
        if isinstance(reference, str) and (target := self._target(reference, place)) is not None:
            made["$ref"] = "#" + _quoted(target)
        dynamic = self._static(place)
        if dynamic is not None and reference is None:
            made |= {"$ref": "#" + _quoted(dynamic[1]), dynamic[0]: None}
        if place.pointer and node.get("$schema", self._dialect) == self._dialect:
            made |= {name: None for name in {"$id", _identity(self._draft)} if isinstance(node.get(name), str)}
        return made

    def _static(self, place: _Place) -> tuple[str, str] | None:
        """A dynamic reference of ``place`` with only one possible target, and the pointer of that."""
        if self._draft == 2020 and isinstance(reference := place.node.get("$dynamicRef"), str):
            target = self._target(reference, place)
            name = unquote(reference.partition("#")[2])
            dynamic = self._dynamic.get(name, [])
            if target is not None and (target not in dynamic or len(dynamic) == 1):
                return "$dynamicRef", target
        if self._draft == 2019 and place.node.get("$recursiveRef") == "#" and not self._recursive:
            return "$recursiveRef", place.root
        return None

    def _target(self, reference: str, place: _Place) -> str | None:
        """The pointer of the target of ``reference`` in ``place``, if it is in the document."""
        uri, _, fragment = reference.partition("#")
        name = unquote(fragment)
        at = resolved(place.base, uri) if uri else place.base
        if at in self._claimed:
            raise self._claimed[at]
        root = place.root if not uri else None if at is None else self._resources.get(at)
        if root is None:
            return None
        if not name or name.startswith("/"):
            return root + name
        return self._anchors.get((root, name))


def _places(node: Any, draft: int, pointer: str = "", base: str | None = NO_COLUMN, root: str = "") -> Iterator[_Place]:
    """``node`` and the schemas in it, as far as keywords contain them."""
    if not isinstance(node, dict):
        return
    identity = node.get(_identity(draft))
    if isinstance(identity, str) and not (draft <= 7 and "$ref" in node):
        uri = identity.partition("#")[0]
        if uri:
            base, root = resolved(base, uri), pointer
    yield _Place(node, pointer, base, root)
    read = {keyword: value for keyword, value in node.items() if _is_read(keyword, value, draft, root)}
    for _keyword, inner, at in subschemas(read, pointer):
        yield from _places(inner, draft, at, base, root)


def _is_read(keyword: str, value: Any, draft: int, root: str) -> bool:
    """Whether ``draft`` has the schemas of ``keyword``, or implementations agree about them; ``root``: root of the
    resource."""
    if draft < _SINCE.get(keyword, 0) and (root or any(_is_named(each, draft) for each in objects_within(value))):
        return False
    return not (keyword in NAMED and isinstance(value, dict) and _is_named(value, draft))


def subschemas(node: Schema, pointer: str) -> Iterator[tuple[str, Any, str]]:
    """The keyword, schema and pointer of each schema directly within ``node``."""
    for keyword, value in node.items():
        at = child(pointer, keyword)
        if keyword in ONE and is_schema(value):
            yield keyword, value, at
        elif keyword in ROW and isinstance(value, list):
            yield from ((keyword, inner, child(at, i)) for i, inner in enumerate(value))
        elif keyword in NAMED and isinstance(value, dict):
            yield from ((keyword, inner, child(at, name)) for name, inner in value.items())


def _anchors(node: dict[str, Any], draft: int) -> Iterator[str]:
    """The names of ``node`` within its resource."""
    if draft <= 7:
        identity = node.get(_identity(draft))
        if isinstance(identity, str) and identity.startswith("#") and "$ref" not in node:
            yield unquote(identity[1:])
        return
    for keyword in ("$anchor", "$dynamicAnchor"):
        if isinstance(name := node.get(keyword), str) and (keyword == "$anchor" or draft == 2020):
            yield name


def _quoted(pointer: str) -> str:
    return pointer.replace("%", "%25")


def _rewritten(node: Any, changes: dict[str, dict[str, Any]], pointer: str) -> Any:
    """``node`` with ``changes`` to its members, which are given by pointer."""
    if isinstance(node, list):
        return [_rewritten(inner, changes, child(pointer, i)) for i, inner in enumerate(node)]
    if not isinstance(node, dict):
        return node
    own = changes.get(pointer, {})
    kept = {name: value for name, value in node.items() if name not in own}
    made = {name: _rewritten(value, changes, child(pointer, name)) for name, value in kept.items()}
    return made | {name: value for name, value in own.items() if value is not None}


class References:
    """The targets of references; each gets a unique name, and is rewritten when it is first used.

    ``barred`` are JSON Pointers that no reference may lead to (``obscure``).
    """

    def __init__(self, root: Any, barred: frozenset[str] = frozenset()) -> None:
        self._root, self._barred = root, barred
        self._names: dict[str, str] = {}

    def name(self, reference: str, pointer: str) -> str:
        """A name for the target of ``reference``, which is at ``pointer``. Raises ``Refused``."""
        target = self.target(reference, pointer)
        self._checked(target, reference, pointer)
        if len(self._names) >= _MOST_REFERENCES:
            raise Refused.at(child(pointer, "$ref"), "$ref", f"more than {_MOST_REFERENCES} schemas are referred to")
        return self._names.setdefault(target, f"r{len(self._names)}")

    def target(self, reference: str, pointer: str) -> str:
        """The JSON Pointer of ``reference``. Raises ``Refused`` if it leaves the document."""
        path = reference.removeprefix("#")
        if path == reference or (path and not path.startswith("/")):
            reason = "must lead to a schema in this document, like #/$defs/name: nothing is fetched"
            raise Refused.at(child(pointer, "$ref"), "$ref", reason)
        return unquote(path)

    def schema(self, reference: str, pointer: str) -> Any:
        """The target of ``reference``. Raises ``Refused`` if there is none."""
        return self._checked(self.target(reference, pointer), reference, pointer)

    def at(self, target: str) -> Any:
        """The schema at the JSON Pointer ``target``. Raises ``Refused`` if there is none."""
        return self._checked(target, "#" + target, "")

    def named(self) -> list[tuple[str, str]]:
        """All targets so far with their names."""
        return list(self._names.items())

    def _checked(self, target: str, reference: str, pointer: str) -> Any:
        found, at = self._root, ""
        for step in target.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found, at = found[step], child(at, step)
            elif isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
                found, at = found[int(step)], child(at, int(step))
            else:
                raise Refused.at(child(pointer, "$ref"), "$ref", f"{reference[:100]!r} names nothing in the schema")
        if not is_schema(found):
            raise Refused.at(child(pointer, "$ref"), "$ref", f"{reference[:100]!r} names no schema")
        if at in self._barred:
            reason = f"{reference[:100]!r} crosses what is no schema, near a name: put it into $defs"
            raise Refused.at(child(pointer, "$ref"), "$ref", reason)
        return found
