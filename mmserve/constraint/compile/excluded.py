"""The regular expression of all strings but a few."""

from __future__ import annotations

from collections.abc import Iterable

from mmserve.constraint.compile import charsets


def all_but(words: Iterable[str]) -> str:
    r"""A ``pattern``, anchored at both ends, of every string that is not one of ``words``.

    The words' prefix tree, turned inside out: at each node a string may end unless a word does, may leave the tree
    by any other character and then go on as it likes, or may follow the tree.
    """
    return f"^{_node(sorted(set(words)), 0)}$"


def _node(words: list[str], depth: int) -> str:
    """``words`` share their first ``depth`` characters; what may follow those."""
    ends = any(len(word) == depth for word in words)
    branches: dict[str, list[str]] = {}
    for word in words:
        if len(word) > depth:
            branches.setdefault(word[depth], []).append(word)
    leave = charsets.text_of(charsets.complement(charsets.union(*(charsets.single(ord(c)) for c in branches))))
    options = [] if ends else [""]
    options.append(f"{leave}[\\s\\S]*")
    for char, inside in branches.items():
        options.append(charsets.text_of(charsets.single(ord(char))) + _node(inside, depth + 1))
    return "(?:" + "|".join(options) + ")"
