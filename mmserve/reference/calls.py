"""Tools to call: random function descriptions, requests that need one of them, several or none, and results; and text
to repeat, for training the copying of arguments."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmserve.reference.items import Subject
from mmserve.reference.scenes import COLORS, KINDS, SIZES
from mmserve.tools.formats import HERMES
from mmserve.tools.parse import written

#: The answer if no tool fits.
NO_TOOL = "There is no tool for that."
_CITIES = ("Paris", "Rome", "Oslo", "Berlin", "Tokyo", "Madrid", "Cairo", "Lima", "Boston", "Delhi", "London", "Kyoto")
_PEOPLE = ("Anna", "Ben", "Carla", "David", "Eva", "Felix", "Gina", "Hugo", "Ida", "Jonas", "Kim", "Lena")
_THINGS = ("milk", "bread", "the report", "a taxi", "flowers", "the keys", "a table", "the tickets", "tea", "the bill")
_DIRECTIONS = ("up", "down", "left", "right")
_UNITS = ("C", "F")
_ARGUMENTS = (*_CITIES, *_PEOPLE, *_THINGS, *_DIRECTIONS, *_UNITS, *KINDS, *COLORS, *SIZES)


@dataclass(frozen=True)
class Function:
    """A tool as chat templates take it; ``request`` draws a text, the arguments of its call, and the result."""

    name: str
    description: str
    properties: dict[str, Any]
    request: Callable[[random.Random], tuple[str, dict[str, Any], Any]]

    @property
    def described(self) -> dict[str, Any]:
        """The function in OpenAI's form."""
        schema = {"type": "object", "properties": self.properties, "required": list(self.properties)}
        own = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": own}


@dataclass(frozen=True)
class Toolset:
    """The tools that are offered, and others of the same kind that are not."""

    offered: tuple[Function, ...]
    absent: tuple[Function, ...]

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """The offered tools as chat templates take them."""
        return tuple(function.described for function in self.offered)


def _weather(rng: random.Random) -> Function:
    place = rng.choice(("city", "location"))
    properties: dict[str, Any] = {place: {"type": "string"}}
    with_unit = rng.random() < 0.4
    if with_unit:
        properties["unit"] = {"type": "string", "enum": list(_UNITS)}

    def request(rng: random.Random) -> tuple[str, dict[str, Any], Any]:
        city, unit = rng.choice(_CITIES), rng.choice(_UNITS)
        asked = rng.choice(
            (f"What is the weather in {city}?", f"What's the weather like in {city}?", f"Weather in {city}")
        )
        phrase = f"{asked} Use {unit}." if with_unit else asked
        return (
            phrase,
            {place: city, **({"unit": unit} if with_unit else {})},
            rng.choice(("sunny", "rain", "snow", "wind")),
        )

    return Function(rng.choice(("get_weather", "weather")), "Get the weather for a location", properties, request)


def _drawing(_rng: random.Random) -> Function:
    properties = {"shape": {"enum": list(KINDS)}, "color": {"enum": list(COLORS)}, "size": {"enum": list(SIZES)}}

    def request(rng: random.Random) -> tuple[str, dict[str, Any], Any]:
        kind, color, size = rng.choice(KINDS), rng.choice(tuple(COLORS)), rng.choice(SIZES)
        phrase = rng.choice((f"Draw a {size} {color} {kind}.", f"Please draw a {size} {color} {kind}."))
        return phrase, {"shape": kind, "color": color, "size": size}, "done"

    return Function("draw", "Draw a shape", properties, request)


def _adding(rng: random.Random) -> Function:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    name, word, sign = rng.choice((("add", "plus", 1), ("subtract", "minus", -1)))

    def request(rng: random.Random) -> tuple[str, dict[str, Any], Any]:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return rng.choice((f"What is {a} {word} {b}?", f"{a} {word} {b}")), {"a": a, "b": b}, a + sign * b

    return Function(name, f"a {word} b", properties, request)


def _moving(_rng: random.Random) -> Function:
    properties = {"direction": {"enum": list(_DIRECTIONS)}, "steps": {"type": "integer", "minimum": 1, "maximum": 99}}

    def request(rng: random.Random) -> tuple[str, dict[str, Any], Any]:
        way, steps = rng.choice(_DIRECTIONS), rng.randint(1, 99)
        return (
            rng.choice((f"Go {steps} steps {way}.", f"Move {way} by {steps}.")),
            {"direction": way, "steps": steps},
            "ok",
        )

    return Function("move", "Move in a direction", properties, request)


def _reminding(rng: random.Random) -> Function:
    when = rng.choice(("minutes", "hours"))
    properties = {"text": {"type": "string"}, when: {"type": "integer"}}

    def request(rng: random.Random) -> tuple[str, dict[str, Any], Any]:
        thing, count = rng.choice(_THINGS), rng.randint(2, 60)
        return f"Remind me of {thing} in {count} {when}.", {"text": thing, when: count}, "set"

    return Function("remind", "Set a reminder", properties, request)


def _messaging(rng: random.Random) -> Function:
    to = rng.choice(("to", "person", "recipient"))
    properties = {to: {"type": "string"}, "message": {"type": "string"}}

    def request(rng: random.Random) -> tuple[str, dict[str, Any], Any]:
        person, thing = rng.choice(_PEOPLE), rng.choice(_THINGS)
        text = f"bring {thing}"
        return (
            rng.choice((f"Tell {person} to {text}.", f"Ask {person} to {text}.")),
            {to: person, "message": text},
            "sent",
        )

    return Function(rng.choice(("send_message", "message")), "Send a message to a person", properties, request)


_MADE = (_weather, _drawing, _adding, _moving, _reminding, _messaging)


def draw_toolset(rng: random.Random) -> Toolset:
    """One to four tools for different purposes, and one that is not offered.

    Of two names for one purpose, either would be right.
    """
    made: dict[str, Function] = {}
    count = rng.choice((1, 1, 2, 2, 3, 4))
    while len(made) <= count:
        function = rng.choice(_MADE)(rng)
        made.setdefault(function.description, function)
    *offered, absent = made.values()
    return Toolset(tuple(offered), (absent,))


Asked = tuple[str, str, tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]


def call(tools: Toolset, rng: random.Random) -> Asked:
    """A request for one tool."""
    function = rng.choice(tools.offered)
    text, arguments, _result = function.request(rng)
    return text, _written([(function.name, arguments)]), tools.tools, ()


def two_calls(tools: Toolset, rng: random.Random) -> Asked:
    """Two requests in one message, each for one tool."""
    chosen = [rng.choice(tools.offered) for _ in range(2)]
    requests = [function.request(rng) for function in chosen]
    text = " ".join(request[0] if request[0][-1] in ".?" else f"{request[0]}." for request in requests)
    return text, _written([(f.name, request[1]) for f, request in zip(chosen, requests, strict=True)]), tools.tools, ()


def no_call(tools: Toolset, rng: random.Random) -> Asked:
    """A request for a tool that is not offered."""
    return tools.absent[0].request(rng)[0], NO_TOOL, tools.tools, ()


def result(tools: Toolset, rng: random.Random) -> Asked:
    """The result of a call, as the answer."""
    function = rng.choice(tools.offered)
    text, arguments, value = function.request(rng)
    own = {"id": "call_0", "type": "function", "function": {"name": function.name, "arguments": arguments}}
    phrase = value if isinstance(value, str) else json.dumps(value)
    turns = (
        {"role": "assistant", "content": "", "tool_calls": [own]},
        {"role": "tool", "tool_call_id": "call_0", "content": json.dumps({"result": value})},
    )
    return text, phrase, tools.tools, turns


def _written(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return written(HERMES, ((name, json.dumps(arguments)) for name, arguments in calls))


CALLS = Subject(
    draw_toolset, lambda _tools: (), {"call": call, "two_calls": two_calls, "no_call": no_call, "result": result}
)


def _draw_words(rng: random.Random) -> list[str]:
    """Two to six words: numbers, what tools are called with, and random letters."""
    return [_word(rng) for _ in range(rng.randint(2, 6))]


def _word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return str(rng.randint(0, 99))
    if kind < 0.5:
        return rng.choice(_ARGUMENTS)
    return _letters(rng, 1, 7)


def _copy(words: list[str], _rng: random.Random) -> tuple[str, str]:
    """The words as they are."""
    return " ".join(words), " ".join(words)


def _reorder(words: list[str], rng: random.Random) -> tuple[str, str]:
    """The words in random order: only a word's letters determine what comes next, not its position."""
    return " ".join(words), " ".join(rng.sample(words, len(words)))


def _draw_dictated(rng: random.Random) -> Toolset:
    """A tool whose name and parameters are random words: everything that a call of it holds is in the prompt."""
    names = [_letters(rng, 3, 8) for _ in range(rng.randint(2, 4))]
    numbers = {name: rng.random() < 0.5 for name in names[1:]}
    properties = {name: {"type": "integer" if number else "string"} for name, number in numbers.items()}

    def request(rng: random.Random) -> tuple[str, dict[str, Any], Any]:
        values = {name: _number(rng) if number else _word(rng) for name, number in numbers.items()}
        phrase = [f"{name} {value}" for name, value in values.items()]
        rng.shuffle(phrase)
        return f"{names[0]} with {', '.join(phrase)}", values, "done"

    return Toolset((Function(names[0], "a tool", properties, request),), ())


def _number(rng: random.Random) -> int:
    """A number of one to three digits, each with the same probability: its length is known only from the prompt."""
    return rng.randint(0, 10 ** rng.randint(1, 3) - 1)


def _letters(rng: random.Random, least: int, most: int) -> str:
    return "".join(rng.choice(string.ascii_letters) for _ in range(rng.randint(least, most)))


#: Calls of tools that no two prompts share; two calls are of the same tool.
DICTATED = Subject(_draw_dictated, lambda _tools: (), {"call": call, "two_calls": two_calls})
#: Answers that are the prompt's own words.
COPIES = Subject(_draw_words, lambda _words: (), {"copy": _copy, "reorder": _reorder})
