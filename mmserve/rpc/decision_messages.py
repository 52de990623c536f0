"""Typed questions in messages: validation, the request that asks them, and the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmserve.core.decisions import (
    CHOICE,
    DECISION_KINDS,
    INSTRUCTION,
    MOST_LEVELS,
    MOST_OPTIONS,
    SCORE,
    Decided,
    Decision,
)
from mmserve.core.events import Finished
from mmserve.core.info import ModelInfo, decisions_unsupported
from mmserve.errors import FieldViolation, InvalidArgument, Unimplemented
from mmserve.v1 import decision_pb2
from mmserve.v1 import generation_pb2 as pb
from mmserve.wire.plain import to_message

#: Maximum questions of a request, characters of an id, and total characters of the questions' texts, which are
#: tokenised before the request is admitted, while others wait.
MOST_QUESTIONS, MOST_ID, MOST_CHARACTERS = 256, 128, 65_536


def parse_decisions(message: decision_pb2.DecideRequest) -> tuple[tuple[str, ...], tuple[Decision, ...]]:
    """Ids and questions of ``message``; raises ``InvalidArgument`` with all violations."""
    questions = message.questions
    if not 1 <= len(questions) <= MOST_QUESTIONS:
        raise InvalidArgument.of("questions", f"must be 1 to {MOST_QUESTIONS}, not {len(questions)}")
    ids = tuple(question.id or str(number) for number, question in enumerate(questions, start=1))
    wrong = [FieldViolation(*each) for i, question in enumerate(questions) for each in _wrong(question, i)]
    for i, name in enumerate(ids):
        if name in ids[:i]:
            wrong.append(FieldViolation(f"questions[{i}].id", f"{name!r} is that of another question"))
    if wrong:
        raise InvalidArgument(*wrong)
    decisions = tuple(map(_decision, questions))
    if (characters := sum(len(decision.asked) for decision in decisions)) > MOST_CHARACTERS:
        why = f"have {characters} characters together, and at most {MOST_CHARACTERS} are read: use messages"
        raise InvalidArgument.of("questions", why)
    return ids, decisions


def generation_of(message: decision_pb2.DecideRequest, info: ModelInfo) -> pb.GenerateRequest:
    """The request whose prompt is the context and the instruction, followed by the questions; raises ``Unimplemented``
    if the model of ``info`` does not support them."""
    if not info.decisions:
        raise Unimplemented(decisions_unsupported(info.name))
    made = pb.GenerateRequest(model=message.model, messages=message.messages)
    if message.HasField("vision"):
        made.vision.CopyFrom(message.vision)
    made.diffusion.quality = pb.QUALITY_EXACT
    made.sampling.max_new_tokens = 1  # the engine determines the length of the branches
    if not made.messages or made.messages[-1].role != pb.ROLE_USER:
        made.messages.add(role=pb.ROLE_USER)
    parts = made.messages[-1].parts
    after_text = bool(parts) and parts[-1].WhichOneof("part") == "text"
    parts.add(text=f"\n{INSTRUCTION}" if after_text else INSTRUCTION)
    return made


def decision_of(name: str, question: Decision, decided: Decided) -> decision_pb2.Decision:
    """The answer to ``question``, with the id ``name``."""
    labels = question.labels
    made = decision_pb2.Decision(id=name, answer=labels[decided.best], mass=decided.mass)
    for label, probability in zip(labels, decided.probabilities, strict=True):
        made.probabilities.add(answer=label, probability=probability)
    if question.kind == SCORE:
        made.expected = sum(question.low + i * p for i, p in enumerate(decided.probabilities))
    return made


def response_of(
    model: str, ids: Sequence[str], questions: Sequence[Decision], finished: Finished, total: float
) -> decision_pb2.DecideResponse:
    """The answers to ``questions``, by their ``ids``, from the request's final event; ``total``: duration
    (milliseconds)."""
    response = decision_pb2.DecideResponse(model=model, forwards=finished.forwards)
    for name, question, each in zip(ids, questions, finished.decisions, strict=True):
        response.decisions.append(decision_of(name, question, each))
    to_message(finished.usage, response.usage)
    to_message(replace(finished.times, total=total), response.times)
    return response


def _wrong(question: decision_pb2.DecisionQuestion, index: int) -> Iterator[tuple[str, str]]:
    path = f"questions[{index}]"
    if len(question.id) > MOST_ID:
        yield f"{path}.id", f"must have at most {MOST_ID} characters"
    kind = question.WhichOneof("kind")
    if kind is None:
        yield path, f"must be one of {', '.join(DECISION_KINDS)}"
    elif not question.text.strip() and not question.instructions.strip():
        yield f"{path}.text", "must not be empty"
    if kind == CHOICE:
        yield from _wrong_options(list(question.choice.options), f"{path}.choice.options")
    elif kind == SCORE:
        yield from _wrong_levels(question.score, f"{path}.score")


def _wrong_options(options: list[str], path: str) -> Iterator[tuple[str, str]]:
    if not 2 <= len(options) <= MOST_OPTIONS:
        yield path, f"must be 2 to {MOST_OPTIONS}, not {len(options)}"
    elif len(set(options)) < len(options):
        yield path, "must differ from each other"
    elif not all(option.strip() for option in options):
        yield path, "must not be empty"


def _wrong_levels(score: decision_pb2.ScoreKind, path: str) -> Iterator[tuple[str, str]]:
    low, high = _bounds(score)
    if not low < high < low + MOST_LEVELS:
        yield f"{path}.high", f"must be above low ({low}), and by less than {MOST_LEVELS}, not {high}"
    elif score.levels and len(score.levels) != high - low + 1:
        yield f"{path}.levels", f"must be {high - low + 1}, one for each level, not {len(score.levels)}"


def _bounds(score: decision_pb2.ScoreKind) -> tuple[int, int]:
    usual = score.low + len(score.levels) - 1 if score.levels else Decision.high
    return score.low, score.high if score.HasField("high") else usual


def _decision(question: decision_pb2.DecisionQuestion) -> Decision:
    kind = question.WhichOneof("kind")
    text, instructions = question.text, question.instructions
    if kind == CHOICE:
        return Decision(kind=kind, text=text, instructions=instructions, options=tuple(question.choice.options))
    if kind == SCORE:
        low, high = _bounds(question.score)
        levels = tuple(question.score.levels)
        return Decision(kind=kind, text=text, instructions=instructions, low=low, high=high, options=levels)
    meanings = (question.yes_no.yes, question.yes_no.no)
    return Decision(kind=kind, text=text, instructions=instructions, options=meanings if any(meanings) else ())
