"""What fields of bodies do, for every kind of model over a real socket; that they are taken at all is of
``test_e2e_openapi.py``, and what constraints and vLLM's own fields do of ``test_e2e_vllm_fields.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from e2e_helpers import running, settings
from helpers import tokenizer
from kinds import KINDS, RANDOM, every_kind
from test_e2e_http import CHAT, ask, events_of, free_port

ROOM = 10


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    config = settings(server={"http_port": free_port()}, engine={"max_tokens": 256})
    with running(replace(config, models=every_kind(tmp_path_factory.mktemp("models")))) as found:
        yield found.background.config.server.http_port
        found.assert_serves()


class Asked:
    """A kind of model that is asked one question with other fields each time, and always for a full answer."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self.common = {
            "model": model,
            "messages": [{"role": "user", "content": "How many shapes are there?"}],
            "max_tokens": ROOM,
            "ignore_eos": True,
            "mmserve": {"diffusion": {"quality": "QUALITY_EXACT"}},
        }

    def __call__(self, **fields: Any) -> Any:
        status, answer, _headers = ask(self._port, {**self.common, **fields})
        assert status == 200, answer
        return answer

    def text(self, **fields: Any) -> str:
        return str(self(**fields)["choices"][0]["message"]["content"])

    def events(self, **fields: Any) -> list[Any]:
        found = events_of(self._port, CHAT, {**self.common, **fields})
        return [json.loads(data) for _name, data in found if data.startswith("{")]


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != RANDOM])
def asked(request: pytest.FixtureRequest, port: int) -> Asked:
    return Asked(port, request.param)


def test_tokens_are_bounded(asked: Asked) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = asked(**{"max_tokens": None, name: 4})
        assert answer["usage"]["completion_tokens"] == 4 and answer["choices"][0]["finish_reason"] == "length"


def test_samples_are_numbered(asked: Asked) -> None:
    choices = asked(n=2, temperature=1.0, seed=3)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]


def test_an_answer_ends_before_a_stop_string(asked: Asked) -> None:
    whole = asked.text()
    found = next(whole[at : at + 2] for at in range(len(whole) // 2, len(whole)))
    for stop in (found, ["no such text", found]):
        choice = asked(stop=stop)["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(found)] and choice["finish_reason"] == "stop"


def test_a_seed_decides_what_is_drawn(asked: Asked) -> None:
    drawn = [asked.text(temperature=3.0, seed=seed) for seed in (1, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda narrow: next(iter(narrow))
)
def test_only_the_most_probable_token_is_drawn(asked: Asked, narrow: dict[str, Any]) -> None:
    assert asked.text(temperature=3.0, seed=1, **narrow) == asked.text(temperature=0)


def test_a_bias_chooses(asked: Asked) -> None:
    [token] = tokenizer().encode("a", add_special_tokens=False)
    assert asked.text(logit_bias={str(token): 100}) == "a" * ROOM
    free = asked.text()
    banned = {str(i): -100 for i in tokenizer().encode(free, add_special_tokens=False)}
    assert asked.text(logit_bias=banned) != free


def test_a_penalty_counts_what_is_there(asked: Asked) -> None:
    """A letter that fills an answer gives way to others as its count grows."""
    near = {str(tokenizer().encode(letter, add_special_tokens=False)[0]): 100 for letter in "abcdef"}
    plain, penalised = asked.text(logit_bias=near), asked.text(logit_bias=near, frequency_penalty=2.0)
    assert set(penalised) <= set("abcdef")
    assert max(map(penalised.count, "abcdef")) < max(map(plain.count, "abcdef"))


def test_log_probabilities_come_with_each_token(asked: Asked) -> None:
    choice = asked(logprobs=True, top_logprobs=3)["choices"][0]
    tokens = choice["logprobs"]["content"]
    data = bytes(byte for token in tokens for byte in token["bytes"])
    assert len(tokens) == ROOM and data.decode(errors="replace") == choice["message"]["content"]
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 3 for token in tokens)


def test_a_stream_adds_up_and_ends_with_the_usage(asked: Asked) -> None:
    chunks = asked.events(stream_options={"include_usage": True})
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    whole = asked()
    assert text == whole["choices"][0]["message"]["content"] and chunks[-1]["usage"] == whole["usage"]


def test_tools_are_called_as_they_are_chosen(asked: Asked) -> None:
    kind = {
        "type": "object",
        "properties": {"b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": kind}} for name in ("f", "g")]
    room: dict[str, Any] = {"max_tokens": 64, "ignore_eos": None, "tools": tools}
    named = {"type": "function", "function": {"name": "g"}}
    for choice, names in (("required", {"f", "g"}), (named, {"g"})):
        message = asked(**room, tool_choice=choice, parallel_tool_calls=False)["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert call["function"]["name"] in names and set(json.loads(call["function"]["arguments"])) == {"b"}
    assert not asked(**room, tool_choice="none")["choices"][0]["message"].get("tool_calls")


def test_labels_and_absence_change_nothing(asked: Asked) -> None:
    labels = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "a")
    absent = dict.fromkeys(("stop", "seed", "temperature", "logit_bias", "response_format", "tools", "n"))
    assert asked.text(**labels, **absent, metadata={"a": "b"}) == asked.text()


@pytest.mark.parametrize("model", KINDS)
def test_tools_beside_a_schema(port: int, model: str) -> None:
    """Calls, or text that obeys the schema; of two tools one alone may be called."""
    kind = {
        "type": "object",
        "properties": {"b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": kind}} for name in ("f", "g")]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    common: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "How many shapes are there?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "tools": tools,
        "parallel_tool_calls": False,
    }
    for choice, room, names in (
        ("auto", 64, {"f", "g", ""}),
        ("auto", 12, {""}),
        ("none", 64, {""}),
        ("required", 64, {"f", "g"}),
        ({"type": "allowed_tools", "allowed_tools": some}, 64, {"g"}),
    ):
        status, answer, _headers = ask(port, {**common, "tool_choice": choice, "max_tokens": room})
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        [called] = [call["function"] for call in message.get("tool_calls", ())] or [{"name": ""}]
        assert called["name"] in names, (choice, answer)
        if called["name"]:
            assert set(json.loads(called["arguments"])) == {"b"} and message["content"] is None
        else:
            assert json.loads(message["content"])["n"] in (1, 2)


@pytest.mark.parametrize("model", KINDS)
def test_an_answer_continues_a_message(port: int, model: str) -> None:
    """After its text: constraints, tokens of the prompt and their count are those of what is before the answer."""
    user, begun = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "There are "}
    common: dict[str, Any] = {"model": model, "max_tokens": ROOM}
    regex = {"structured_outputs": {"regex": "[0-9] shapes"}}
    asked = {**common, **regex, "messages": [user, begun], "continue_final_message": True}
    status, answer, _headers = ask(port, asked)
    assert status == 200 and re.fullmatch("[0-9] shapes", answer["choices"][0]["message"]["content"]), answer
    counts = []
    for messages in ([user], [user, begun]):
        body = {"model": model, "messages": messages}
        counts.append(ask(port, body, "/v1/messages/count_tokens")[1]["input_tokens"])
        events = [json.loads(data) for _name, data in events_of(port, "/v1/messages", {**common, "messages": messages})]
        first, end = events[0]["message"]["usage"], events[-2]["usage"]
        assert first["input_tokens"] + first["cache_read_input_tokens"] == counts[-1]
        assert all(end[name] == first[name] for name in end if "input" in name)
    assert answer["usage"]["prompt_tokens"] == counts[1] > counts[0]
