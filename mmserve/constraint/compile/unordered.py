"""Documents with members in any order, and arrays of distinct items, as a Lark grammar for llguidance.

llguidance enforces one order of a schema's members. Its parametric grammars (``docs/parametric.md`` there) have a
64-bit parameter for each rule: here one bit for each member or item seen. Parts of a schema without these features stay
schemas.
"""

from __future__ import annotations

import json
from typing import Any

from mmserve.constraint.compile.derivatives import all_but
from mmserve.constraint.compile.expression import BadPattern
from mmserve.constraint.compile.finite import least_fixpoint
from mmserve.constraint.compile.keywords import Schema, children, names_of, nodes, target, types_of, writable
from mmserve.constraint.compile.pattern import searched
from mmserve.constraint.compile.scalars import anchored

#: Bits of a rule's parameter that are used: members in any order, or distinct items of an array.
MOST = 63
#: Keyword of arrays in schemas of ``compile.schema``: each value that ``items`` lists by ``enum`` occurs at most once.
DISTINCT = "distinct"


class Inexpressible(Exception):
    """An array of distinct items that cannot be expressed, for example because other schemas apply to it."""


def distinct_within(schema: Any) -> bool:
    """Whether ``schema`` has arrays of distinct items."""
    return any(node.get(DISTINCT) for node in nodes(schema))


def written(schema: Any, engine: Schema, *, any_order: bool) -> tuple[str, list[str]]:
    """A Lark grammar of the documents under ``schema``, and the reasons why some objects keep the schema's order.

    ``engine``: the layout as ``x-guidance`` options. Raises ``Inexpressible``.
    """
    writer = _Writer(schema, engine, any_order=any_order)
    return writer.text(), list(writer.kept)


class _Writer:
    def __init__(self, schema: Any, engine: Schema, *, any_order: bool) -> None:
        self._definitions: Schema = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._root = {name: each for name, each in schema.items() if name != "$defs"} if self._definitions else schema
        self._engine, self._any_order = engine, any_order
        self.kept: dict[str, None] = {}
        self._lines: list[str] = []
        self._rules: dict[str, str] = {}  # by the schema that they are for
        #: Definitions that need separate rules.
        self._special = least_fixpoint(self._definitions, self._becomes_special)

    def text(self) -> str:
        """The text of the grammar."""
        start = self._value(self._root)
        space = self._engine.get("whitespace_pattern", "")
        comma, colon = self._engine.get("item_separator", f"{space},{space}"), f"{space}:{space}"
        between = {"comma": comma, "colon": self._engine.get("key_separator", colon)}
        between |= {"open": rf"\{{{space}", "close": rf"{space}\}}", "begin": rf"\[{space}", "end": rf"{space}\]"}
        signs = [f"{name}: /{expression}/" for name, expression in between.items()]
        return "\n".join([f"start: {start}", *signs, *self._lines]) + "\n"

    def _becomes_special(self, name: str, special: set[str]) -> bool:
        self._special = special
        return self._is_more(self._definitions[name])

    def _is_more(self, schema: Any) -> bool:
        """Whether llguidance's schemas cannot express all of ``schema``."""
        if not isinstance(schema, dict) or "enum" in schema:
            return False
        if schema.get(DISTINCT) or (self._any_order and self._varies(schema)):
            return True
        if "$ref" in schema and target(schema) in self._special:
            return True
        return any(map(self._is_more, children(schema)))

    def _varies(self, node: Schema) -> bool:
        """Whether the members of an object may have another order than the schema's."""
        if "object" not in types_of(node):
            return False
        properties = node.get("properties", {})
        named = len({*(name for name, each in properties.items() if each is not False), *node.get("required", ())})
        rest = node.get("additionalProperties", True) is not False or bool(node.get("patternProperties"))
        return bool(named) and named + rest > 1

    def _value(self, schema: Any) -> str:
        """The rule of ``schema``."""
        if not self._is_more(schema):
            return self._leaf(schema)
        key = json.dumps(schema)
        if key not in self._rules:
            self._rules[key] = name = self._new()
            self._lines.append(f"{name}: {' | '.join(self._ways(schema))}")
        return self._rules[key]

    def _ways(self, schema: Schema) -> list[str]:
        """The alternatives of ``schema``, which llguidance's schemas cannot express."""
        if schema.keys() <= {"$ref"}:
            return [self._value(self._definitions[target(schema)])]
        if schema.keys() <= {"anyOf"}:
            return [self._value(each) for each in schema["anyOf"] if each is not False] or [self._leaf(schema)]
        if schema.keys() & {"anyOf", "allOf", "$ref"}:
            return [self._given_up(schema, "that are joined with other schemas")]
        kinds, ways = types_of(schema), list[str]()
        for kind, write in (("object", self._object), ("array", self._array)):
            if kind in kinds and self._is_more({**schema, "type": kind}):
                ways.append(write({**schema, "type": kind}))
                kinds -= {kind}
        return [*ways, self._leaf({**schema, "type": names_of(kinds)})] if kinds else ways

    def _given_up(self, schema: Schema, why: str) -> str:
        """``schema`` without these features, as a schema."""
        if any(self._has_distinct(node) for node in nodes(schema)):
            raise Inexpressible
        self.kept[why] = None
        return self._leaf(schema)

    def _has_distinct(self, node: Schema) -> bool:
        reached, queue = set[str](), [node]
        while queue:
            for inner in nodes(queue.pop()):
                if inner.get(DISTINCT):
                    return True
                if "$ref" in inner and (name := target(inner)) not in reached:
                    reached.add(name)
                    queue.append(self._definitions[name])
        return False

    def _leaf(self, schema: Any) -> str:
        """A rule of ``schema`` as it is."""
        body = {} if schema is True else schema
        reached, queue = dict[str, Any](), [body]
        while queue:
            for node in nodes(queue.pop()):
                if "$ref" in node and (name := target(node)) not in reached:
                    reached[name] = self._definitions[name]
                    queue.append(reached[name])
        whole = {**body, **({"$defs": reached} if reached else {}), "x-guidance": self._engine}
        key = _json(whole)
        if key not in self._rules:
            self._rules[key] = name = self._new()
            self._lines.append(f"{name}: %json {key}")
        return self._rules[key]

    def _new(self) -> str:
        return f"r{len(self._rules)}"

    def _object(self, node: Schema) -> str:
        properties, rest = node.get("properties", {}), node.get("additionalProperties", True)
        patterns, required = node.get("patternProperties", {}), node.get("required", [])
        named = {name: each for name, each in properties.items() if each is not False}
        named |= {name: rest for name in required if name not in properties}
        if node.keys() & {"minProperties", "maxProperties"}:
            return self._given_up(node, "whose properties are counted")
        if patterns and (properties or named or rest is not False):
            return self._given_up(node, "that have patternProperties beside other properties")
        if self._any_order and len(named) > MOST:
            return self._given_up(node, f"of more than {MOST} properties")
        if any(named.get(name, False) is False for name in required) or not all(map(writable, named)):
            return self._given_up(node, "whose names cannot be written")
        others = [self._member(key, each) for key, each in patterns.items() if each is not False]
        if not patterns and rest is not False:
            try:
                others = [self._member(anchored(searched(all_but([*properties, *named]))), rest)]
            except (BadPattern, RecursionError):
                return self._given_up(node, "with names too many or too long to tell from others")
        members, ready, left = (self._in_any_order if self._any_order else self._in_order)(named, required)
        name = self._rules[f"object {len(self._rules)}"] = self._new()
        ways = [
            f"{_quoted(each)} colon {self._value(named[each])} {name}n::{then} %if {when}"
            for each, then, when in members
        ]
        then, when = ("_", "true") if self._any_order else (str(len(named)), ready)
        ways += [f"{other} {name}n::{then} %if {when}" for other in others]
        self._lines += [
            f"{name}: open {name}f::0",
            f'{name}f::_: "}}" %if {ready} | {name}m::_' if ways else f'{name}f::_: "}}"',
            f"{name}n::_: close %if {ready} | comma {name}m::_ %if {'true' if others else left}",
            *([f"{name}m::_: {' | '.join(ways)}"] if ways else []),
        ]
        return name

    def _member(self, pattern: str, schema: Any) -> str:
        """A member whose name matches ``pattern``."""
        return f"{self._leaf({'type': 'string', 'pattern': pattern})} colon {self._value(schema)}"

    def _in_any_order(self, named: Schema, required: list[str]) -> tuple[list[tuple[str, str, str]], str, str]:
        """Members, each with its update of the parameter and the condition under which it may come; the condition under
        which the object may end; and that under which members are left. Required members have the lowest bits."""
        order = [*dict.fromkeys(required), *(name for name in named if name not in required)]
        members = [(name, f"set_bit({bit})", f"bit_clear({bit})") for bit, name in enumerate(order)]
        needed = len(set(required))
        left = f"not(is_ones([0:{len(order)}]))" if order else "not(true)"
        return members, f"is_ones([0:{needed}])" if needed else "true", left

    def _in_order(self, named: Schema, required: list[str]) -> tuple[list[tuple[str, str, str]], str, str]:
        """As ``_in_any_order``, for members in the order of ``named``; the parameter is the first member still
        allowed."""
        members, least = list[tuple[str, str, str]](), 0
        for place, name in enumerate(named):
            members.append((name, str(place + 1), f"and(ge(_, {least}), le(_, {place}))"))
            least = place + 1 if name in required else least
        return members, f"ge(_, {least})", f"lt(_, {len(named)})"

    def _array(self, node: Schema) -> str:
        if node.get(DISTINCT):
            return self._distinct(node)
        first, rest = node.get("prefixItems", []), node.get("items", True)
        low, high = node.get("minItems", 0), node.get("maxItems")
        count = len(first)
        least, most = max(0, low - count), None if high is None else max(0, high - count)
        if False in first or (most is not None and most < least) or (rest is False and least):
            return self._given_up(node, "in arrays that end early")
        name = self._rules[f"array {len(self._rules)}"] = self._new()
        for place, each in enumerate(first):
            ways = ["end" if place else '"]"'] if place >= low else []
            if high is None or place < high:
                ways.append(f"{'comma ' if place else ''}{self._value(each)} {name}p{place + 1}")
            self._lines.append(f"{name}p{place}: {' | '.join(ways)}")
        if rest is False or most == 0:
            tail = "end" if count else '"]"'
        elif count:
            tail = f"(comma {self._value(rest)}){_times(least, most)} end"
        else:
            more = _times(max(0, least - 1), None if most is None else most - 1)
            tail = f"{self._value(rest)} (comma {self._value(rest)}){more} end" + ("" if least else ' | "]"')
        self._lines += [f"{name}: begin {name}p0", f"{name}p{count}: {tail}"]
        return name

    def _distinct(self, node: Schema) -> str:
        """An array of distinct values. Raises ``Inexpressible`` if its items are not a plain ``enum``."""
        items = node.get("items")
        values = items.get("enum", []) if isinstance(items, dict) and items.keys() <= {"enum", "type"} else []
        if not 0 < len(values) <= MOST:
            raise Inexpressible
        low, high = node.get("minItems", 0), min(node.get("maxItems", MOST), len(values))
        bits = f"[0:{len(values)}]"
        name = self._rules[f"array {len(self._rules)}"] = self._new()
        ways = [f"{self._leaf({'enum': [value]})} {name}n::set_bit({bit}) %if bit_clear({bit})"
                for bit, value in enumerate(values)]  # fmt: skip
        ready = f"bit_count_ge({bits}, {low})"
        self._lines += [
            f"{name}: begin {name}f::0",
            f'{name}f::_: "]" %if {ready} | {name}m::_' if high else f'{name}f::_: "]"',
            f"{name}n::_: end %if {ready} | comma {name}m::_ %if bit_count_lt({bits}, {high})",
            f"{name}m::_: {' | '.join(ways)}",
        ]
        return name


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _quoted(name: str) -> str:
    """The JSON text of ``name`` as a literal."""
    return _json(_json(name)).replace("\x7f", "\\u007f")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
