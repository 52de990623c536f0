"""``$ref`` within one document: JSON Pointers, and nothing that would need a network or a scope."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from mmserve.constraint.compile.shapes import is_schema
from mmserve.constraint.findings import Refused, child

_MOST_REFERENCES = 2_000


class References:
    """The targets of references, by name; each is named once and can be rewritten when it is first met.

    ``barred`` are JSON Pointers that no reference may lead to (``resources.obscure``).
    """

    def __init__(self, root: Any, barred: frozenset[str] = frozenset()) -> None:
        self._root, self._barred = root, barred
        self._names: dict[str, str] = {}

    def name(self, reference: str, pointer: str) -> str:
        """A name for the target of ``reference``, which stands at ``pointer``. Raises ``Refused``."""
        target = self.target(reference, pointer)
        self._checked(target, reference, pointer)
        if len(self._names) >= _MOST_REFERENCES:
            raise Refused.at(child(pointer, "$ref"), "$ref", f"more than {_MOST_REFERENCES} schemas are referred to")
        return self._names.setdefault(target, f"r{len(self._names)}")

    def target(self, reference: str, pointer: str) -> str:
        """The JSON Pointer that ``reference`` is. Raises ``Refused`` for one that leaves the document."""
        path = reference.removeprefix("#")
        if path == reference or (path and not path.startswith("/")):
            reason = "must lead to a schema in this document, like #/$defs/name: nothing is fetched"
            raise Refused.at(child(pointer, "$ref"), "$ref", reason)
        return unquote(path)

    def schema(self, reference: str, pointer: str) -> Any:
        """The schema that ``reference`` names. Raises ``Refused`` where there is none."""
        return self._checked(self.target(reference, pointer), reference, pointer)

    def at(self, target: str) -> Any:
        """The schema at ``target``, a JSON Pointer. Raises ``Refused`` where there is none."""
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
            elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step[:6]) < len(found):
                found, at = found[int(step[:6])], child(at, int(step[:6]))
            else:
                raise Refused.at(child(pointer, "$ref"), "$ref", f"{reference[:100]!r} names nothing in the schema")
        if not is_schema(found):
            raise Refused.at(child(pointer, "$ref"), "$ref", f"{reference[:100]!r} names no schema")
        if at in self._barred:
            reason = f"{reference[:100]!r} crosses what is no schema, near a name: put it into $defs"
            raise Refused.at(child(pointer, "$ref"), "$ref", reason)
        return found
