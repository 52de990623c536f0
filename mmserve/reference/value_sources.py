"""Where the arguments of a call are in the question: the tokens that ``copying`` has them copied from.

A token of an argument often has no equal one there (`` red`` in a sentence, ``red`` in JSON), but the same characters.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from mmserve.reference.items import Question
from mmserve.tools.formats import HERMES
from mmserve.tools.parse import CallPiece, CallReader

#: Characters of the answer from, characters of the question from, and how many.
Span = tuple[int, int, int]


def value_spans(question: Question) -> list[Span]:
    """Spans of the arguments in the answer that are whole words of the question, as strings or numbers.

    Of a value that occurs several times, as often in the calls as in the question, the i-th is the i-th; else there is
    none.
    """
    places: dict[str, list[int]] = defaultdict(list)
    at = 0
    for arguments in _arguments(question.answer):
        for name, value in arguments.items():
            written = json.dumps(value)
            at = question.answer.index(f"{json.dumps(name)}: {written}", at) + len(json.dumps(name)) + 2
            places[str(value)].append(at + (written != str(value)))  # after the quotation mark
    spans = []
    for text, found in places.items():
        sources = [m.start() for m in re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", question.text)]
        if len(sources) == len(found):
            spans += [(to, by, len(text)) for to, by in zip(found, sources, strict=True)]
    return spans


def source_tokens(spans: Sequence[Span], answer: Sequence[str], question: Sequence[str]) -> dict[int, int]:
    """Index of a token of the answer to the index of the token of the question with its first character in a span.

    The token after a span in the answer has the one after it in the question: that shows whether the value has ended.
    ``answer`` and ``question`` are the texts of the tokens.
    """
    owner = [i for i, text in enumerate(question) for _ in text]
    ends = [*accumulate(map(len, answer))]
    found = {}
    for to, by, length in spans:
        for i, end in enumerate(ends):
            begin = end - len(answer[i])
            first = max(to, begin)
            if first < min(end, to + length):
                found[i] = owner[by + first - to]
            elif begin == to + length and by + length < len(owner):
                found.setdefault(i, owner[by + length])
    return found


def _arguments(answer: str) -> list[dict[str, object]]:
    """The arguments of each call of an answer, in order."""
    reader = CallReader(HERMES)
    made: dict[int, str] = defaultdict(str)
    for piece in (*reader.feed(answer), *reader.end()):
        if isinstance(piece, CallPiece):
            made[piece.index] += piece.arguments
    return [json.loads(each) for _index, each in sorted(made.items())]
