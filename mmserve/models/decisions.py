"""The canvas of typed questions as tokens: fixed text, a slot for each question, and the tokens a slot may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from mmserve.core.decisions import Decision, before_slots
from mmserve.errors import InvalidArgument
from mmserve.models.chat import plain_ids

#: What answers are as tokens.
_known: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, tuple[int, ...]]] = WeakKeyDictionary()
_MOST_KNOWN = 4096


@dataclass(frozen=True)
class Slots:
    """A canvas with slots.

    ``ids`` are the canvas's tokens, ``places`` the index of each slot in them (what they hold there means nothing), and
    ``candidates`` the tokens of each question's answers, in the order of ``Decision.answers``.
    """

    ids: tuple[int, ...]
    places: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]


def slots(tokenizer: PreTrainedTokenizerBase, questions: Sequence[Decision], fill: int, *, together: bool) -> Slots:
    """The canvas of ``questions``, its slots filled with token ``fill``; ``together`` as of ``questions_text``.

    Raises ``InvalidArgument`` naming the question where one of its answers is not one token of the model's.
    """
    ids: list[int] = []
    places = []
    for text in before_slots(questions, together=together):
        ids += plain_ids(tokenizer, text)
        places.append(len(ids))
        ids.append(fill)
    return Slots(tuple(ids), tuple(places), answer_tokens(tokenizer, questions))


def answer_tokens(tokenizer: PreTrainedTokenizerBase, questions: Sequence[Decision]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each question's answers, as of ``Slots.candidates``; raises as ``slots`` does."""
    return tuple(_answer_tokens(tokenizer, question, index) for index, question in enumerate(questions))


def _answer_tokens(tokenizer: PreTrainedTokenizerBase, question: Decision, index: int) -> tuple[int, ...]:
    """One token for each answer: with a space before it where that is one token for all of them, else without."""
    for begin in (" ", ""):
        encoded = [_encoded(tokenizer, begin + answer) for answer in question.answers]
        found = tuple(ids[0] for ids in encoded if len(ids) == 1)
        if len(found) == len(encoded) == len(set(found)):
            return found
    answers = ", ".join(question.answers)
    raise InvalidArgument.of(
        f"questions[{index}]", f"the model's tokenizer does not have one token for each of {answers}"
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    known = _known.setdefault(tokenizer, {})
    if text not in known:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[text] = tuple(tokenizer.encode(text, add_special_tokens=False))
    return known[text]
