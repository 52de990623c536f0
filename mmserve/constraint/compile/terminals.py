"""Terminals of Lark grammars: those of ``%import common``, and lazy repetitions rewritten without laziness.

A full match is the same, lazy or not. But a lexer ends a token of ``/".*?"/`` at the first possible end, so that
``"a"b"`` is not a token: its tokens are the matches without a proper prefix that is a match, i.e. the expression's
automaton without transitions out of accepting states. A terminal whose end would depend on the following text is
refused.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.constraint.compile.derivatives import DEAD, Automaton, as_expression, edges
from mmserve.constraint.compile.expression import BadPattern, Chars, Group, Item, Repeat, items_of, text_of
from mmserve.constraint.compile.pattern import parsed
from mmserve.constraint.compile.syntax import Definition, Matching, Node, Syntax, item_of, parts_of, rebuilt, refs_of
from mmserve.constraint.findings import Refused

_INT = "[0-9]+"
_SIGN = "[+-]?"
_EXP = f"[eE]{_SIGN}{_INT}"
_DECIMAL = rf"(?:{_INT}\.(?:{_INT})?|\.{_INT})"
_FLOAT = f"(?:{_INT}{_EXP}|{_DECIMAL}(?:{_EXP})?)"
_NUMBER = f"(?:{_FLOAT}|{_INT})"

#: The terminals of ``%import common`` as expressions by name. Their languages are those of Lark's
#: ``lark/grammars/common.lark`` (lark-parser/lark, 9bae961); lazy repetitions are replaced by repeated parts that
#: exclude the end.
COMMON: dict[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": _INT,
    "SIGNED_INT": _SIGN + _INT,
    "DECIMAL": _DECIMAL,
    "_EXP": _EXP,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": _SIGN + _FLOAT,
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": _SIGN + _NUMBER,
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}


def without_lazy_repetitions(syntax: Syntax, kind: str) -> Syntax:
    """``syntax``, in which all names are defined, without lazy repetitions. Raises ``Refused`` with the line."""
    own = {name for name, each in syntax.terminals.items() if _is_lazy(each.node)}
    lazy = own | {n for n, each in syntax.terminals.items() if own and own & syntax.reached(each.node).keys()}
    if not lazy and not any(_is_lazy(each.node) for each in syntax.rules.values()):
        return syntax
    nodes = [*syntax.skipped, *(each.node for each in syntax.rules.values())]
    used = {ref.name for node in nodes for ref in refs_of(node)}
    terminals = {
        name: Definition(_token(name, syntax, kind), each.line) if name in lazy & used else each
        for name, each in syntax.terminals.items()
    }
    rules = {
        name: replace(each, node=_in_rule(each.node, name, each.line, kind)) for name, each in syntax.rules.items()
    }
    return replace(syntax, rules=rules, terminals=terminals)


def _is_lazy(node: Node) -> bool:
    if isinstance(node, Matching):
        return _repeats_lazily(node.item)
    return any(map(_is_lazy, parts_of(node)))


def _repeats_lazily(item: Item) -> bool:
    return any(isinstance(each, Repeat) and each.lazy for each in items_of(item))


def _token(name: str, syntax: Syntax, kind: str) -> Node:
    """The terminal ``name`` as one expression, with its references expanded."""
    line = syntax.terminals[name].line
    known: dict[str, Item] = {}
    try:
        return Matching(_first_ends(_whole(name, syntax, known)))
    except BadPattern as error:
        raise _refused(name, line, kind, str(error)) from error
    except ValueError as error:
        raise _refused(name, line, kind, "a lazy repetition cannot be in a terminal with '&' or '~'") from error


def _whole(name: str, syntax: Syntax, known: dict[str, Item]) -> Item:
    if name not in known:
        node = syntax.terminals[name].node
        for ref in refs_of(node):
            _whole(ref.name, syntax, known)
        known[name] = item_of(node, known)
    return known[name]


def _in_rule(node: Node, name: str, line: int, kind: str) -> Node:
    """``node`` of a rule: each expression in it is a separate token."""

    if isinstance(node, Matching) and _repeats_lazily(node.item):
        try:
            return Matching(_first_ends(node.item))
        except BadPattern as error:
            raise _refused(name, line, kind, str(error)) from error
    return rebuilt(node, lambda part: _in_rule(part, name, line, kind))


def _refused(name: str, line: int, kind: str, reason: str) -> Refused:
    return Refused.at(f"/{line}", kind, f"line {line}, {name!r}: {reason}")


def _first_ends(item: Item) -> Item:
    """``item``, a whole token, without lazy repetitions. Raises ``BadPattern``."""
    branches = item.branches if isinstance(item, Group) else ((item,),)
    rows = tuple(_row(_flat(branch)) for branch in branches)
    if any(_repeats_lazily(part) for branch in branches for part in branch) and () in rows:
        raise BadPattern("a lazy repetition with nothing after it matches the empty text; write what ends it")
    return Group(rows)


def _flat(row: tuple[Item, ...]) -> tuple[Item, ...]:
    """``row`` with groups that have a single alternative replaced by their items."""
    found: list[Item] = []
    for item in row:
        if isinstance(item, Group) and len(item.branches) == 1:
            found += _flat(item.branches[0])
        else:
            found.append(item)
    return tuple(found)


def _row(row: tuple[Item, ...]) -> tuple[Item, ...]:
    """A sequence without lazy repetitions."""
    for at, item in enumerate(row):
        if isinstance(item, Repeat) and item.lazy:
            before = tuple(_inner(each) for each in row[:at])
            return (*before, *_repeated(item, row[at + 1 :]))
    return tuple(_inner(each) for each in row)


def _inner(item: Item) -> Item:
    """A part that is not a lazy repetition, with the lazy repetitions in it rewritten: they end within it."""
    if not _repeats_lazily(item):
        return item
    if isinstance(item, Repeat):
        return replace(item, item=_inner(item.item))
    assert isinstance(item, Group)
    for branch in item.branches:
        last = _flat(branch)[-1:]
        if last and isinstance(last[0], Repeat) and last[0].lazy:
            raise BadPattern(
                "a lazy repetition at the end of a group is ended by what follows the group; write that inside it"
            )
    return Group(tuple(_row(_flat(branch)) for branch in item.branches))


def _repeated(item: Repeat, rest: tuple[Item, ...]) -> tuple[Item, ...]:
    """The lazy ``item`` followed by the ``rest`` of its sequence."""
    plain = Repeat(_inner(item.item), item.low, item.high)
    if not rest:  # only the required repetitions
        return (Repeat(plain.item, item.low, item.low),) if item.low else ()
    if isinstance(rest[0], Repeat) and rest[0].lazy:
        raise BadPattern("a lazy repetition right after another one is not supported")
    rest = tuple(part for each in rest for part in _unrolled(each))
    ends = 0
    while ends < len(rest) and _is_fixed(rest[ends]):
        ends += 1
    if ends and isinstance(_bare(plain.item), Chars):
        return (_shortest((plain, *rest[:ends])), *_row(rest[ends:]))
    stop = next((i for i, each in enumerate(rest) if _repeats_lazily(each)), len(rest))
    whole = (plain, *rest[:stop])
    if not _prefix_free(whole):
        raise BadPattern(
            "a lazy repetition is supported of single characters before a text of a fixed length, and where no end can "
            "come too early"
        )
    return (*whole, *_row(rest[stop:]))


def _unrolled(item: Item) -> tuple[Item, ...]:
    """``item`` split into its required and optional repetitions."""
    if not isinstance(item, Repeat) or item.lazy or not item.low or item.low == item.high:
        return (item,)
    high = None if item.high is None else item.high - item.low
    return Repeat(item.item, item.low, item.low), Repeat(item.item, 0, high)


def _bare(item: Item) -> Item:
    """``item`` without groups around it."""
    while isinstance(item, Group) and len(item.branches) == 1 and len(item.branches[0]) == 1:
        item = item.branches[0][0]
    return item


def _is_fixed(item: Item) -> bool:
    """Whether ``item`` only matches texts of one length."""
    if isinstance(item, Repeat):
        return item.low == item.high and isinstance(_bare(item.item), Chars)
    return isinstance(_bare(item), Chars)


def _shortest(row: tuple[Item, ...]) -> Item:
    """The texts that ``row`` matches and that have no proper prefix that it matches."""
    automaton = Automaton(text_of(Group((row,))))
    found = edges(automaton)
    if found is None:
        raise BadPattern("a lazy repetition has too many ways to its end")
    kept = {pair: ranges for pair, ranges in found.items() if DEAD not in pair and not automaton.ends(pair[0])}
    states = {state for pair in kept for state in pair}
    expression = as_expression(kept, {state for state in states if automaton.ends(state)})
    if expression is None:
        raise BadPattern("a lazy repetition has too many ways to its end")
    return parsed(expression)


def _prefix_free(row: tuple[Item, ...]) -> bool:
    """Whether no text that ``row`` matches is a proper prefix of another one."""
    automaton = Automaton(text_of(Group((row,))))
    found = edges(automaton)
    return found is not None and all(target == DEAD for source, target in found if automaton.ends(source))
