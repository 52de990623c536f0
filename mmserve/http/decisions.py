"""Typed questions over HTTP: ``/v1/decisions`` and ``/v1/systemone``, with the fields of SGLang and vLLM.

Both parse a context, images and questions to a ``DecideRequest``; they differ in names. Answers are by the questions'
ids. An option or level with a description is shown to the model with it, and is named without it in the response.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mmserve.core.decisions import CHOICE, MOST_OPTIONS, SCORE, YES_NO
from mmserve.errors import InvalidArgument, MMServeError
from mmserve.http.api import model_in, required
from mmserve.http.errors import openai_error
from mmserve.http.fields import Fields
from mmserve.http.media import image
from mmserve.v1 import decision_pb2 as pb
from mmserve.v1 import generation_pb2

#: Version of the prompt format of questions (``core/decisions.py``).
PROMPT_FORMAT = 1


@dataclass(frozen=True)
class Named:
    """A question of a body: its id, its kind, and the names of its answers."""

    id: str
    kind: str
    names: tuple[str, ...]
    legend: tuple[Any, ...] = ()  # levels of a score, as in the body


@dataclass(frozen=True)
class ParsedDecisions:
    """A parsed body. ``temperature`` scales the probabilities of the answers, but not their mass."""

    message: pb.DecideRequest
    questions: tuple[Named, ...]
    temperature: float = 1.0
    #: The location of each question in the body, if it differs from its index (``errors.renamed``).
    places: Mapping[str, str] = field(default_factory=dict)


class DecisionApi(Protocol):
    """One API for typed questions."""

    @property
    def names(self) -> Mapping[str, str]:
        """Names in bodies of fields of ``DecideRequest``."""
        ...

    def read(self, body: dict[str, Any]) -> ParsedDecisions:
        """The request in ``body``; raises ``InvalidArgument`` with its invalid fields."""
        ...

    def reply(self, asked: ParsedDecisions, response: pb.DecideResponse) -> dict[str, Any]:
        """The JSON object of the response."""
        ...

    def error(self, error: MMServeError) -> dict[str, Any]:
        """The body of a response with ``error``."""
        ...


#: Types of image parts in both APIs; images precede the text of the context.
_IMAGES = {f"messages[-].parts[].image{source}": "images[]" for source in ("", ".data", ".media_id")}


class DecisionsApi:
    """``/v1/decisions``."""

    names: Mapping[str, str] = {
        "messages": "input",
        **_IMAGES,
        "questions[].text": "questions[].question",
        "questions[].choice.options": "questions[].options",
        "questions[].score.levels": "questions[].levels",
        "questions[].score.high": "questions[].levels",
    }

    def read(self, body: dict[str, Any]) -> ParsedDecisions:
        fields = Fields(body)
        context = _text(fields, "input")
        if not context.strip():
            raise InvalidArgument.of("input", "is required")
        message = _message(fields, context)
        temperature = fields.take("temperature", float, 1.0)
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InvalidArgument.of("temperature", "must be above 0")
        version = fields.take("prompt_format_version", int, PROMPT_FORMAT)
        if version != PROMPT_FORMAT:
            raise InvalidArgument.of("prompt_format_version", f"must be {PROMPT_FORMAT}, not {version}")
        if fields.take("return_prompt_token_ids", bool, False):
            raise InvalidArgument.of("return_prompt_token_ids", "is not supported")
        given = required(fields, "questions", list)
        _no_template_options(fields)
        fields.end()
        named = []
        for i, each in enumerate(given):
            with Fields.of(each, f"questions[{i}]") as own:
                kind, name = required(own, "type", str), required(own, "id", str)
                if not name:
                    raise InvalidArgument.of(own.path("id"), "must not be empty")
                asked = message.questions.add(id=name, text=_text(own, "question"))
                named.append(_decision(own, kind, name, asked))
        return ParsedDecisions(message, tuple(named), temperature)

    def reply(self, asked: ParsedDecisions, response: pb.DecideResponse) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for named, decision in zip(asked.questions, response.decisions, strict=True):
            probabilities = _scaled([p.probability for p in decision.probabilities], asked.temperature)
            answer: dict[str, Any] = {
                "type": named.kind,
                "probabilities": dict(zip(named.names, probabilities, strict=True)),
                "label_mass": decision.mass,
            }
            if named.kind == CHOICE:
                answer["choice"] = named.names[_best(probabilities)]
            elif named.kind == SCORE:
                answer["score"] = _mean(probabilities)
            answers[named.id] = answer
        tokens = response.usage.prompt_tokens
        return {
            "object": "decisions",
            "model": response.model,
            "prompt_format_version": PROMPT_FORMAT,
            "answers": answers,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
            "mmserve": {"forwards": response.forwards},
        }

    def error(self, error: MMServeError) -> dict[str, Any]:
        return openai_error(error, self.names)


class SystemOneApi:
    """``/v1/systemone``: questions by their ids, with ``criteria`` that describe the answers."""

    names: Mapping[str, str] = {
        "messages": "state",
        **_IMAGES,
        "questions[]": "@[]",
        "questions[].text": "@[].instructions",
        "questions[].choice.options": "@[].criteria",
        "questions[].score.levels": "@[].criteria",
        "questions[].score.high": "@[].criteria",
    }

    def read(self, body: dict[str, Any]) -> ParsedDecisions:
        fields = Fields(body)
        if "state" not in body:
            raise InvalidArgument.of("state", "is required")
        message = _message(fields, _text(fields, "state"))
        for name in ("temperature", "prompt_format_version", "return_prompt_token_ids"):
            if fields.any(name) is not None:
                raise InvalidArgument.of(name, "is not a field of this API; /v1/decisions supports it")
        given = required(fields, "questions", dict)
        if "" in given:
            raise InvalidArgument.of("questions", "must have names that are not empty")
        _no_template_options(fields)  # other fields are ignored: the published schema allows them
        named = []
        for name, each in given.items():
            with Fields.of(each, f"questions.{name}"[:200]) as own:
                kind = required(own, "type", str)
                asked = message.questions.add(id=name, text=_text(own, "instructions"))
                named.append(_by_criteria(own, kind, name, asked))
        places = {f"@[{i}]": f"questions.{name}"[:200] for i, name in enumerate(given)}
        return ParsedDecisions(message, tuple(named), places=places)

    def reply(self, asked: ParsedDecisions, response: pb.DecideResponse) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for named, decision in zip(asked.questions, response.decisions, strict=True):
            probabilities = [p.probability for p in decision.probabilities]
            if named.kind == YES_NO:
                answers[named.id] = {"type": "noul", "noul": probabilities[0], "x_label_mass": decision.mass}
                continue
            own: dict[str, Any] = {"type": named.kind}
            if named.kind == CHOICE:
                own["choice"], own["confidence"] = named.names[_best(probabilities)], _above_chance(probabilities)
            else:
                own["score"], own["confidence"] = _mean(probabilities), _concentration(probabilities)
                own["legend"] = dict(zip(named.names, named.legend, strict=True))
            own["probabilities"] = dict(zip(named.names, probabilities, strict=True))
            answers[named.id] = {**own, "x_label_mass": decision.mass}
        usage = {"input_tokens": response.usage.prompt_tokens, "output_tokens": 0}
        return {"model": response.model, "answers": answers, "usage": usage}

    def error(self, error: MMServeError) -> dict[str, Any]:
        return openai_error(error, self.names)


DECISION_APIS: dict[str, DecisionApi] = {"/v1/decisions": DecisionsApi(), "/v1/systemone": SystemOneApi()}


def _message(fields: Fields, context: str) -> pb.DecideRequest:
    """A request for the body's model, with its images and ``context``."""
    message = pb.DecideRequest(model=model_in(fields))
    images = [_image(each, f"images[{i}]") for i, each in enumerate(fields.take("images", list, []))]
    if images or context:
        chat = message.messages.add(role=generation_pb2.ROLE_USER, parts=images)
        if context:
            chat.parts.add(text=context)
    return message


def _image(given: Any, path: str) -> generation_pb2.ContentPart:
    """An image by its URL, alone or in a chat's ``image_url`` part."""
    if isinstance(given, str):
        return image(given, path)
    fields = Fields.of(given, path)
    if (nested := fields.nested("image_url")) is not None:
        fields.take("type", str)
        fields.end()
        fields = nested
    url = required(fields, "url", str)
    fields.take("detail", str)
    fields.end()
    return image(url, fields.path("url"))


def _decision(fields: Fields, kind: str, name: str, asked: pb.DecisionQuestion) -> Named:
    """Copy the fields of ``/v1/decisions`` besides the question's text to ``asked``."""
    if kind == CHOICE:
        names, meanings = dict[str, None](), list[str]()  # in their order
        for i, option in enumerate(required(fields, "options", list)):
            with Fields.of(option, fields.path(f"options[{i}]")) as own:
                option_name = required(own, "name", str)
                if option_name in names:
                    raise InvalidArgument.of(own.path("name"), f"{option_name!r} is that of another option")
                names[option_name] = None
                meanings.append(_text(own, "description"))
        asked.choice.SetInParent()
        asked.choice.options.extend(_described([*names], meanings))
        return Named(name, kind, tuple(names))
    if kind == SCORE:
        return _levels(required(fields, "levels", list), fields.path("levels"), name, asked)
    if kind == YES_NO:
        asked.yes_no.yes, asked.yes_no.no = _text(fields, "yes"), _text(fields, "no")
        return Named(name, kind, ("yes", "no"))
    raise InvalidArgument.of(fields.path("type"), f"must be one of {CHOICE!r}, {SCORE!r}, {YES_NO!r}")


def _by_criteria(fields: Fields, kind: str, name: str, asked: pb.DecisionQuestion) -> Named:
    """The same for ``/v1/systemone``, whose yes/no questions are ``noul``."""
    if kind == "noul":
        asked.yes_no.SetInParent()
        with fields.within("criteria") as meanings:
            asked.yes_no.yes, asked.yes_no.no = _text(meanings, "true"), _text(meanings, "false")
        if not asked.text.strip():
            asked.text = "Is this so?" if asked.yes_no.yes or asked.yes_no.no else ""
        return Named(name, YES_NO, ("yes", "no"))
    if kind == CHOICE:
        criteria = required(fields, "criteria", dict)
        asked.choice.SetInParent()
        asked.choice.options.extend(_described([*criteria], [_as_text(meaning) for meaning in criteria.values()]))
        asked.text = asked.text or "Which is it?"
        return Named(name, kind, tuple(criteria))
    if kind == SCORE:
        asked.text = asked.text or "Which level is it?"
        return _levels(required(fields, "criteria", list), fields.path("criteria"), name, asked)
    raise InvalidArgument.of(fields.path("type"), f"must be one of 'noul', {CHOICE!r}, {SCORE!r}")


def _levels(levels: Sequence[Any], path: str, name: str, asked: pb.DecisionQuestion) -> Named:
    if len(levels) < 2:
        raise InvalidArgument.of(path, f"must hold at least two levels, not {len(levels)}")
    texts = [_as_text(level) for level in levels]
    if not all(text.strip() for text in texts):
        raise InvalidArgument.of(path, "must hold a text for each level")
    asked.score.SetInParent()
    asked.score.levels.extend(texts)
    return Named(name, SCORE, tuple(str(level) for level in range(len(levels))), tuple(levels))


def _described(names: Sequence[str], meanings: Sequence[str]) -> list[str]:
    """The text of each option: its name, and its meaning in parentheses. Texts of different options differ: more
    parentheses are used if a name is the text of another option. Only names if there are too many, which is refused."""
    if len(names) > MOST_OPTIONS:
        return list(names)
    for depth in itertools.count(1):
        texts = [
            f"{name} {'(' * depth}{meaning}{')' * depth}" if meaning else name
            for name, meaning in zip(names, meanings, strict=True)
        ]
        if len(set(texts)) == len(set(names)):
            return texts
    raise AssertionError("unreachable: texts of finitely many options differ from some depth on")


def _text(fields: Fields, name: str) -> str:
    return _as_text(fields.any(name))


def _as_text(value: Any) -> str:
    """A text unchanged; any other JSON value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _no_template_options(fields: Fields) -> None:
    given: Mapping[str, Any] = fields.take("chat_template_kwargs", dict, {})
    if given:
        raise InvalidArgument.of("chat_template_kwargs", "must be empty: the model's chat template takes no options")


def _scaled(probabilities: Sequence[float], temperature: float) -> list[float]:
    if temperature == 1:
        return list(probabilities)
    highest = max(probabilities)
    weights = [(p / highest) ** (1 / temperature) for p in probabilities]
    return [weight / math.fsum(weights) for weight in weights]


def _best(probabilities: Sequence[float]) -> int:
    return max(range(len(probabilities)), key=lambda i: probabilities[i])


def _mean(probabilities: Sequence[float]) -> float:
    return math.fsum(level * p for level, p in enumerate(probabilities))


def _above_chance(probabilities: Sequence[float]) -> float:
    """0 if all options are equally probable, 1 if one is certain."""
    count = len(probabilities)
    return max(0.0, (max(probabilities) - 1 / count) / (1 - 1 / count))


def _concentration(probabilities: Sequence[float]) -> float:
    """1 if one level is certain; 0 if the mean distance from the most probable one is at least that of equally probable
    levels from their middle."""
    count, best = len(probabilities), _best(probabilities)
    distance = math.fsum(p * abs(level - best) for level, p in enumerate(probabilities))
    even = math.fsum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / even)
