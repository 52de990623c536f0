"""The shortest sentences of a context-free grammar.

The fewest bytes of every rule are a fixpoint over all rules, found by Knuth's generalisation of Dijkstra's algorithm
(D. E. Knuth, "A generalization of Dijkstra's algorithm", Information Processing Letters 6(1), 1977): the cheapest rule
of those whose cost is known is final, and costs of rules that refer to it are found anew. A rule that is never final
has no sentence.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from mmserve.constraint.compile.charsets import Ranges
from mmserve.constraint.compile.expression import Chars, Group, Item, Repeat
from mmserve.constraint.compile.syntax import (
    Both,
    Either,
    Json,
    Literal,
    Matching,
    Node,
    Not,
    Ref,
    Row,
    Syntax,
    Times,
    refs_of,
)

#: Bytes and rules of a derivation. With the rules counted, a rule costs more than any rule within its derivation.
Cost = tuple[int, int]
_NOTHING: Cost = (0, 0)
#: Characters that are taken first where an expression has a choice of them.
_PLAIN = "a1A0bxnzX2-_. "


@dataclass(frozen=True)
class Sketch:
    """A shortest sentence, word by word; None where a word's text has to be looked for.

    ``gap``: a shortest text of what is skipped between words; None where nothing is.
    """

    words: tuple[str | None, ...]
    gap: str | None = None


class Hole:
    """A part of a sentence for which no text is known."""


HOLE = Hole()
Piece = str | Hole


@dataclass(frozen=True)
class Derivations:
    """The cheapest derivation of every rule and terminal that has a sentence."""

    syntax: Syntax
    costs: dict[str, Cost]

    @property
    def least(self) -> int | None:
        """Fewest bytes of a sentence of the grammar; None where it has none."""
        found = self.costs.get(self.syntax.start)
        return None if found is None else found[0]

    def endless(self) -> list[str]:
        """Rules without a sentence that the grammar's first rule refers to, directly or not."""
        reached = self.syntax.reached(Ref(self.syntax.start))
        return [name for name in self.syntax.names if name in reached and name not in self.costs]

    def pieces(self, most: int) -> list[Piece] | None:
        """The words of a shortest sentence, without what is skipped between them; None where there are more than
        ``most`` of them or it is not known how long they are."""
        if self.syntax.start not in self.costs:
            return None
        found = list[Piece]()
        stack: list[Node] = [Ref(self.syntax.start)]
        while stack:
            if len(found) > most:
                return None
            node = stack.pop()
            match node:
                case Ref(name) if name in self.syntax.rules:
                    stack.append(self.syntax.rules[name].node)
                case Row(parts):
                    stack += reversed(parts)
                case Either(options):
                    stack.append(min(options, key=self._known))
                case Times(part, low, _):
                    if low > most:
                        return None
                    stack += [part] * low
                case Json():
                    found.append(HOLE)
                case _:
                    text = self.text(node)
                    if text is None:
                        return None
                    if text:
                        found.append(text)
        return found

    def _known(self, node: Node) -> tuple[bool, Cost]:
        found = cost_of(node, self.costs)
        return found is None, found or _NOTHING

    def text(self, node: Node) -> str | Hole | None:
        """A shortest text of a word; ``HOLE`` where it has to be looked for."""
        match node:
            case Literal(text):
                return text
            case Matching(item):
                return shortest_of(item)
            case Ref(name):
                return self.text(self.syntax.terminals[name].node)
            case Either(options):
                return self.text(min(options, key=self._known))
            case Times(part, low, _):
                return self._joined([part] * min(low, 1), low)
            case Row(parts):
                return self._joined(parts, 1)
        return HOLE

    def _joined(self, parts: tuple[Node, ...] | list[Node], times: int) -> str | Hole:
        texts = [self.text(part) for part in parts]
        return "".join(text for text in texts if isinstance(text, str)) * times if HOLE not in texts else HOLE


def derivations(syntax: Syntax) -> Derivations:
    """The cheapest derivations of ``syntax``, all of whose references are to names that it has."""
    names = syntax.names
    users = defaultdict[str, set[str]](set)
    for name, definition in names.items():
        for ref in refs_of(definition.node):
            users[ref.name].add(name)
    costs, best = dict[str, Cost](), dict[str, Cost]()
    queue = list[tuple[Cost, str]]()

    def offer(name: str) -> None:
        found = cost_of(names[name].node, costs)
        if found is not None and (name not in best or found < best[name]):
            best[name] = found
            heapq.heappush(queue, (found, name))

    for name in names:
        offer(name)
    while queue:
        cost, name = heapq.heappop(queue)
        if name in costs:
            continue
        costs[name] = cost
        for user in users[name]:
            if user not in costs:
                offer(user)
    return Derivations(syntax, costs)


def cost_of(node: Node, costs: dict[str, Cost]) -> Cost | None:
    """The least cost of ``node``, given those of names; None where it has no sentence by them."""
    match node:
        case Literal(text):
            return len(text.encode()), 0
        case Matching(item):
            size = least_of(item)
            return None if size is None else (size, 0)
        case Ref(name):
            found = costs.get(name)
            return None if found is None else (found[0], found[1] + 1)
        case Row(parts):
            return _sum([cost_of(part, costs) for part in parts])
        case Either(parts):
            return min((found for part in parts if (found := cost_of(part, costs)) is not None), default=None)
        case Times(part, low, _):
            if not low:
                return _NOTHING
            found = cost_of(part, costs)
            return None if found is None else (found[0] * low, found[1] * low)
        case Both(parts):
            all_known = [cost_of(part, costs) for part in parts]
            return None if None in all_known else max(found for found in all_known if found is not None)
        case Not(part):
            return None if any(ref.name not in costs for ref in refs_of(part)) else _NOTHING
        case Json(_, least):
            return least, 0


def _sum(found: list[Cost | None]) -> Cost | None:
    known = [cost for cost in found if cost is not None]
    return (sum(a for a, _ in known), sum(b for _, b in known)) if len(known) == len(found) else None


def least_of(item: Item) -> int | None:
    """Fewest bytes of a text that ``item`` matches; None where it matches none."""
    match item:
        case Chars(ranges):
            return _bytes(ranges[0][0]) if ranges else None
        case Group(branches):
            rows = [[least_of(part) for part in branch] for branch in branches]
            return min((sum(size for size in row if size is not None) for row in rows if None not in row), default=None)
        case Repeat(part, low, _):
            size = least_of(part)
            return 0 if not low else None if size is None else low * size
    return 0


def _bytes(code: int) -> int:
    return 1 if code < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4


def shortest_of(item: Item) -> str:
    """A shortest text that ``item``, which matches some, does."""
    match item:
        case Chars(ranges):
            return _character(ranges)
        case Group(branches):
            whole = [branch for branch in branches if all(least_of(part) is not None for part in branch)]
            best = min(whole, key=lambda branch: sum(least_of(part) or 0 for part in branch))
            return "".join(map(shortest_of, best))
        case Repeat(part, low, _):
            return shortest_of(part) * low if low else ""
    return ""


def _character(ranges: Ranges) -> str:
    for char in _PLAIN:
        if any(low <= ord(char) <= high for low, high in ranges):
            return char
    printable = (low for low, high in ranges if high >= 0x20)
    code = next(printable, ranges[0][0])
    return chr(code if _bytes(code) == _bytes(ranges[0][0]) else ranges[0][0])
