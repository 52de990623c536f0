"""Every option of a request is defined, typed and documented in one place."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmserve.client.cache
from mmserve.client import AsyncClient, Client, Options
from mmserve.client.outgoing import build_request
from mmserve.client.video_requests import configuration, question_message
from mmserve.errors import InvalidArgument
from mmserve.v1 import cache_pb2, video_pb2

METHODS = [Client.generate, Client.stream, AsyncClient.generate, AsyncClient.stream]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_help_documents_every_argument_and_option(method: Callable[..., Any]) -> None:
    text = inspect.getdoc(method) or ""
    described = dict(re.findall(r"^(\w+): (.+)$", text, re.MULTILINE))
    named = [name for name, parameter in inspect.signature(method).parameters.items() if parameter.kind != 4]
    assert set(described) >= {*Options.__annotations__, *named} - {"self"}
    for name in Options.__annotations__:
        said = re.search(rf"^{name}: (.+\n(?: {{4}}.+\n)*)", text + "\n", re.MULTILINE)
        assert said and "default" in said[1], f"the documentation of {name} must name its default"


@pytest.mark.parametrize(
    ("prompt", "media", "why"),
    [
        (None, {}, "messages: must be a text, or a list of messages, not None"),
        ({"role": "user", "content": "x"}, {}, "messages: must be a text, or a list of messages, not {'role'"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], {}, r"messages\[0\]: must have a text as its"),
        (
            [{"role": "user", "content": None}],
            {},
            r"messages\[0\]: must have a text as its content; Message\(role, parts\)",
        ),
        ("x", {"images": Path("x.png")}, "images: must be a list, not PosixPath"),
        ("x", {"images": b"x"}, "images: must be a list, not b'x'"),
        ("x", {"videos": "x"}, "videos: must be a list, not 'x'"),
    ],
)
def test_other_types_than_those_of_prompts_and_media_are_refused(prompt: Any, media: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        build_request(prompt, **{"images": (), **media}, deltas=False, snapshots=False)


def test_an_option_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"there is no option 'temprature'; did you mean 'temperature'\?"):
        build_request("x", (), deltas=False, snapshots=False, temprature=1.0)  # type: ignore[call-arg]
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match=r"no option 'xyz'$"):
        client.generate("x", xyz=1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "option",
    [
        {"adapter": "mine"},
        {"tools": [{"name": "f"}]},
        {"tokens": True},
        {"regex": "a"},
        {"schema": {}, "constraint_mode": "lenient"},
        {"max_pixels": 100},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_a_session_does_not_have_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="is not an option of a session"):
        configuration(**option)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("option", [{"keep_ratio": 0.5}, {"pruner": "random"}, {"max_pixels": 100}, {"model": "m"}])
def test_options_of_a_sessions_frames_are_refused_in_its_questions(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(option))}: is not an option of a question"):
        question_message("q", "what?", "now", None, schema=None, snapshots=False, options=option)


def test_an_option_of_a_session_that_is_none_has_its_default() -> None:
    none: dict[str, Any] = dict.fromkeys(("overload", "memory", "rate", "n", "commit", "adapter"))
    assert configuration(**none) == configuration()
    assert configuration().overload == video_pb2.OVERLOAD_POLICY_BLOCK


def test_a_prompt_to_be_warmed_is_not_encoded_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are read, and its pictures encoded."""
    encoding: list[threading.Thread] = []

    def noted(*args: Any, **options: Any) -> Any:
        encoding.append(threading.current_thread())
        return build_request(*args, **options)

    async def call(*_: Any) -> cache_pb2.WarmResponse:
        return cache_pb2.WarmResponse(id="x")

    monkeypatch.setattr(mmserve.client.cache, "build_request", noted)
    assert asyncio.run(mmserve.client.cache.AsyncCache(call).warm("x")).id == "x"
    assert encoding and encoding[0] is not threading.current_thread()
