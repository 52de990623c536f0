"""The cheapest derivations of a grammar's rules: the shortest sentence of each.

The minimum bytes of every rule are a fixpoint over all rules, computed by Knuth's generalisation of Dijkstra's
algorithm (D. E. Knuth, "A generalization of Dijkstra's algorithm", Information Processing Letters 6(1), 1977). The
cheapest rule with a known cost is final, and the costs of rules that refer to it are updated. A rule that never becomes
final has no sentence.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from math import inf

from mmserve.constraint.compile.expression import least_of, shortest_of
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

#: Maximum nodes visited for each word of a shortest sentence.
_STEPS = 50
#: Bytes and rules of a derivation. Counting rules makes each rule cost more than any rule within its derivation.
Cost = tuple[float, int]
_NOTHING: Cost = (0, 0)
_NEVER: Cost = (inf, 0)  # cost without a sentence


@dataclass(frozen=True)
class Derivations:
    """The cheapest derivation of every rule and terminal that has a sentence."""

    syntax: Syntax
    costs: dict[str, Cost]

    @property
    def least(self) -> int | None:
        """Minimum bytes of a sentence of the grammar; None if it has none."""
        found = self.costs.get(self.syntax.start)
        return None if found is None else int(found[0])

    def endless(self) -> list[str]:
        """Rules without a sentence that the start rule refers to, directly or not."""
        reached = self.syntax.reached(Ref(self.syntax.start))
        return [name for name in self.syntax.names if name in reached and name not in self.costs]

    def pieces(self, most: int) -> list[str | None] | None:
        """The words of a shortest sentence (see ``Sketch``), without skipped text; None if there are more than
        ``most``, or no sentence."""
        if self.syntax.start not in self.costs:
            return None
        found = list[str | None]()
        stack: list[Node] = [Ref(self.syntax.start)]
        for _ in range(_STEPS * most):
            if not stack:
                return found
            if len(found) > most:
                return None
            node = stack.pop()
            match node:
                case Ref(name) if name in self.syntax.rules:
                    stack.append(self.syntax.rules[name].node)
                case Row(parts):
                    stack += reversed(parts)
                case Either(parts):
                    stack.append(min(parts, key=self._cost))
                case Times(part, low, _):
                    if low > most:
                        return None
                    stack += [part] * low
                case _:
                    text = self.text(node)
                    found += [] if text == "" else [text]
        return None  # repetitions of the empty text

    def _cost(self, node: Node) -> Cost:
        return cost_of(node, self.costs)

    def text(self, node: Node) -> str | None:
        """A shortest text of a word; None if it must be searched."""
        match node:
            case Literal(text):
                return text
            case Matching(item):
                return shortest_of(item)
            case Ref(name):
                return self.text(self.syntax.terminals[name].node)
            case Either(parts):
                return self.text(min(parts, key=self._cost))
            case Times(part, low, _):
                once = self.text(part) if low else ""
                return None if once is None else once * low
            case Row(parts):
                texts = [self.text(part) for part in parts]
                return None if None in texts else "".join(filter(None, texts))
        return None


def derivations(syntax: Syntax) -> Derivations:
    """The cheapest derivations of ``syntax``, in which all references are defined."""
    names = syntax.names
    users = defaultdict[str, set[str]](set)
    for name, definition in names.items():
        for ref in refs_of(definition.node):
            users[ref.name].add(name)
    costs, best = dict[str, Cost](), dict[str, Cost]()
    queue = list[tuple[Cost, str]]()

    def offer(name: str) -> None:
        found = cost_of(names[name].node, costs)
        if found < best.get(name, _NEVER):
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


def cost_of(node: Node, costs: dict[str, Cost]) -> Cost:
    """The least cost of ``node``, given the costs of names; infinite if it has no sentence with these."""
    match node:
        case Literal(text):
            return len(text.encode()), 0
        case Matching(item):
            return least_of(item), 0
        case Ref(name):
            size, rules = costs.get(name, _NEVER)
            return size, rules + 1
        case Row(parts):
            found = [cost_of(part, costs) for part in parts]
            return sum(size for size, _ in found), sum(rules for _, rules in found)
        case Either(parts):
            return min(cost_of(part, costs) for part in parts)
        case Times(part, low, _):
            size, rules = cost_of(part, costs) if low else _NOTHING
            return size * low, rules * low
        case Both(parts):
            return max(cost_of(part, costs) for part in parts)
        case Not(part):
            return _NEVER if any(ref.name not in costs for ref in refs_of(part)) else _NOTHING
        case Json(_, least):
            return least, 0
