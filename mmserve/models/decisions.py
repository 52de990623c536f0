"""Tokenisation of typed questions: the ids of each after the prompt, and the candidate tokens of its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from mmserve.core.decisions import Decision
from mmserve.errors import InvalidArgument
from mmserve.models.chat import plain_ids, prompt_ids

#: Tokens of each answer.
_known: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, tuple[int, ...]]] = WeakKeyDictionary()
_MOST_KNOWN = 4096
#: Token ids after the user's text, with and without special tokens.
_closing: WeakKeyDictionary[PreTrainedTokenizerBase, dict[bool, list[int]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class QuestionIds:
    """Tokenised typed questions.

    ``before``: the ids of each from the end of the shared prompt to its slot; ``candidates``: the tokens of its
    answers, in the order of ``Decision.answers``.
    """

    before: tuple[tuple[int, ...], ...]
    candidates: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each question, including its slot."""
        return [len(ids) + 1 for ids in self.before]


def questions_ids(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Decision], *, special_tokens: bool = False
) -> QuestionIds:
    """``questions`` tokenised for a model; ``special_tokens``: see ``prompt_ids``.

    Raises ``InvalidArgument`` naming the question if one of its answers is not a single token.
    """
    closing = closing_ids(tokenizer, special_tokens=special_tokens)
    before = tuple((*question_ids(tokenizer, question), *closing) for question in questions)
    return QuestionIds(before, answer_tokens(tokenizer, questions))


def shared_prompt(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, special_tokens: bool = False) -> list[int]:
    """The part of a prompt's ``ids`` that its typed questions share: without the tokens after the user's last text.

    Raises ``InvalidArgument`` if the chat template ends this chat differently from others.
    """
    closing = closing_ids(tokenizer, special_tokens=special_tokens)
    if closing and ids[-len(closing) :] != closing:
        why = "end in a way of the model's chat template in which it cannot be asked typed questions"
        raise InvalidArgument.of("messages", why)
    return ids[: len(ids) - len(closing)]


def closing_ids(tokenizer: PreTrainedTokenizerBase, *, special_tokens: bool = False) -> list[int]:
    """The ids of a prompt after the user's last text: the end of the turn, and the beginning of the answer's turn.

    ``special_tokens``: see ``prompt_ids``.
    """
    known = _closing.setdefault(tokenizer, {})
    if special_tokens not in known:
        chats = [[{"role": "user", "content": text}] for text in ("0", "1")]
        one, other = (prompt_ids(tokenizer, chat, special_tokens=special_tokens)[::-1] for chat in chats)
        same = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        known[special_tokens] = one[:same][::-1]
    return known[special_tokens]


def question_ids(tokenizer: PreTrainedTokenizerBase, question: Decision) -> list[int]:
    """The ids of a question after the instruction."""
    return plain_ids(tokenizer, f"\n{question.asked}")


def answer_tokens(tokenizer: PreTrainedTokenizerBase, questions: Sequence[Decision]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each question's answers (see ``QuestionIds.candidates``); raises as ``questions_ids``."""
    return tuple(_answer_tokens(tokenizer, question, index) for index, question in enumerate(questions))


def _answer_tokens(tokenizer: PreTrainedTokenizerBase, question: Decision, index: int) -> tuple[int, ...]:
    """One token for each answer: with a leading space if that is a single token for all of them, else without."""
    for begin in (" ", ""):
        encoded = [_encoded(tokenizer, begin + answer) for answer in question.answers]
        found = tuple(ids[0] for ids in encoded if len(ids) == 1)
        if len(found) == len(encoded) == len(set(found)):
            return found
    few = ", ".join(question.answers[:12]) + (", …" if len(question.answers) > 12 else "")
    raise InvalidArgument.of(
        f"questions[{index}]",
        f"the model's tokenizer does not have one token for each of {few}; most have one for each of 0 to 9",
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    known = _known.setdefault(tokenizer, {})
    if text not in known:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[text] = tuple(tokenizer.encode(text, add_special_tokens=False))
    return known[text]
