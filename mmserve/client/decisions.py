"""Typed questions for ``decide``, and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmserve.client.options import Chat, Image, Video
from mmserve.client.outgoing import build_request
from mmserve.core.events import StageTimes, Usage
from mmserve.core.request import VideoSampling
from mmserve.core.session import Asked
from mmserve.errors import InvalidArgument
from mmserve.v1 import decision_pb2 as pb
from mmserve.wire.plain import from_message, put


@dataclass(frozen=True)
class YesNo:
    """A question whose answer is yes or no; ``yes`` and ``no``: descriptions of these answers, if needed."""

    text: str
    yes: str = ""
    no: str = ""
    instructions: str = ""


@dataclass(frozen=True)
class Choice:
    """A question whose answer is one of 2 to 26 ``options``."""

    text: str
    options: Sequence[str]
    instructions: str = ""


@dataclass(frozen=True)
class Score:
    """A question whose answer is a level from ``low`` to ``high``; ``levels``: descriptions of the levels, if
    needed."""

    text: str
    low: int = 0
    high: int | None = None
    levels: Sequence[str] = ()
    instructions: str = ""


TypedQuestion = YesNo | Choice | Score


@dataclass(frozen=True)
class Answered:
    """The answer to one question.

    ``answer``: the most probable one (``yes``, an option, a level); ``probabilities``: of all answers, which sum to 1;
    ``mass``: total probability of the answers in the vocabulary; ``expected``: the mean level of a score.
    """

    id: str
    answer: str
    probabilities: Mapping[str, float]
    mass: float
    expected: float | None = None


@dataclass(frozen=True)
class Decisions:
    """The answers to the questions of one call, in order or by their ids.

    ``asked``: for a video session, the frames that they are about.
    """

    model: str
    answers: tuple[Answered, ...]
    usage: Usage
    forwards: int
    times: StageTimes
    asked: Asked | None = None

    def __getitem__(self, key: int | str) -> Answered:
        """The answer by the question's index, from 0, or by its id."""
        if isinstance(key, int):
            return self.answers[key]
        found = next((each for each in self.answers if each.id == key), None)
        if found is None:
            raise KeyError(key)
        return found

    def __iter__(self) -> Iterator[Answered]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)


def build_decision(
    prompt: str | Sequence[Chat],
    questions: Sequence[TypedQuestion] | Mapping[str, TypedQuestion],
    images: Sequence[Image],
    videos: Sequence[Video],
    video_sampling: VideoSampling | None,
    model: str,
) -> pb.DecideRequest:
    """The message for these arguments; raises ``InvalidArgument`` for invalid ones."""
    chat: str | Sequence[Chat] = prompt
    if isinstance(prompt, str) and not prompt:
        chat = [{"role": "user", "content": " "}] if images or videos else []
    context = build_request(chat, images, deltas=False, snapshots=False, videos=videos, video_sampling=video_sampling)
    if not prompt and context.messages:  # only media
        del context.messages[-1].parts[-1]
    request = pb.DecideRequest(messages=context.messages)
    put(request, "", model=model or None)
    named = questions.items() if isinstance(questions, Mapping) else (("", question) for question in questions)
    for i, (name, question) in enumerate(named):
        request.questions.append(_question(name, question, f"questions[{i}]"))
    return request


def to_decisions(response: pb.DecideResponse, asked: Asked | None = None) -> Decisions:
    """The answers in ``response``; ``asked``: see ``Decisions``."""
    answers = [
        Answered(
            d.id,
            d.answer,
            {p.answer: p.probability for p in d.probabilities},
            d.mass,
            d.expected if d.HasField("expected") else None,
        )
        for d in response.decisions
    ]
    usage, times = from_message(Usage, response.usage), from_message(StageTimes, response.times)
    return Decisions(response.model, tuple(answers), usage, response.forwards, times, asked)


def _question(name: str, question: TypedQuestion, path: str) -> pb.DecisionQuestion:
    if not isinstance(question, YesNo | Choice | Score):
        raise InvalidArgument.of(path, f"must be a YesNo, a Choice or a Score, not {question!r}")
    made = pb.DecisionQuestion()
    put(made, f"{path}.", id=name, text=question.text, instructions=question.instructions)
    if isinstance(question, YesNo):
        made.yes_no.SetInParent()
        put(made.yes_no, f"{path}.", yes=question.yes, no=question.no)
        return made
    texts: Any = question.options if isinstance(question, Choice) else question.levels
    if isinstance(texts, str):
        raise InvalidArgument.of(path, f"must hold several texts, not {texts!r} alone")
    try:
        if isinstance(question, Choice):
            made.choice.options.extend(texts)
        else:
            made.score.levels.extend(texts)
    except TypeError as error:
        raise InvalidArgument.of(path, f"must hold texts: {error}") from error
    if isinstance(question, Score):
        put(made.score, f"{path}.", low=question.low, high=question.high)
    else:
        made.choice.SetInParent()
    return made
