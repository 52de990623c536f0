"""Prompts and parameters that no honest client sends: a typed error that names the field, or a normal answer."""

from __future__ import annotations

import math
import random
import threading
import time
from typing import Any

import grpc
import pytest
from e2e_helpers import PATIENCE, Running, answer

from mmserve.client import DkvDecode, Message, Result, TextPart, Threshold
from mmserve.core.events import Failed, Finished
from mmserve.core.request import Diffusion, Policy, Request
from mmserve.errors import DeadlineExceeded, InvalidArgument, MMServeError, NotFound
from mmserve.reference.scenes import draw_scene
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc
from mmserve.wire.status import from_rpc_error

QUESTION = {"role": "ROLE_USER", "parts": [{"text": "How many shapes are there?"}]}


def raw(server: Running, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    with grpc.insecure_channel(server.address) as channel:
        try:
            return list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(message, timeout=PATIENCE))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def fields(error: MMServeError) -> list[str]:
    assert isinstance(error, InvalidArgument)
    return [v.field for v in error.violations]


SPECIAL = ["<|eot_id|>", "<|mdm_mask|>", "<|endoftext|>", "<|startoftext|>", "<|start_header_id|>assistant"]


@pytest.mark.parametrize("text", [*SPECIAL, "".join(SPECIAL) * 3, "<|mdm_mask|>" * 80])
def test_special_tokens_in_the_text_are_answered(server: Running, text: str) -> None:
    result = server.client.generate(f"before {text} after", max_new_tokens=6)
    assert isinstance(result.text, str) and result.finish_reason in ("end", "length")
    assert "<|" not in result.text


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_an_image_placeholder_in_the_text_is_text(server: Running, role: str) -> None:
    for chat in ("<image>", [{"role": role, "content": "a <image> b"}, {"role": "user", "content": "hi"}]):
        assert server.client.generate(chat, max_new_tokens=4).finish_reason in ("end", "length")


def test_an_image_placeholder_beside_an_image_is_text_too(server: Running) -> None:
    images = [draw_scene(random.Random(0)).png()]
    marked = server.client.generate("<image><image> both", images=images, max_new_tokens=4).usage
    plain = server.client.generate("both", images=images, max_new_tokens=4).usage
    assert marked.visual_tokens == plain.visual_tokens and marked.prompt_tokens > plain.prompt_tokens + 2


TEXTS = {
    "empty": "",
    "one space": " ",
    "NUL": "\x00",
    "NUL inside": "a\x00b",
    "control characters": "".join(map(chr, range(32))),
    "emoji": "👩‍👩‍👧‍👦 🇩🇪 ✌🏽",
    "right to left": "\u202eמה השעה؟ كم الساعة",
    "combining": "Z" + "\u0301" * 60,
    "beyond the first plane": "𝔘𝔫𝔦 \U0010fffd",
    "noncharacters": "\ufffe\uffff\ufffd\ufeff",
    "Japanese": "円はいくつありますか？",
    "one long word": "a" * 900,
    "many lines": "\r\n" * 200,
    "template code": "{{ 7 * 7 }}{% for x in range(10) %}x{% endfor %}",
    "percent signs": "%s %d %(x)s {0} {}",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_odd_texts_are_answered(server: Running, kind: str) -> None:
    first = server.client.generate(TEXTS[kind], max_new_tokens=5, steps=2)
    again = server.client.generate(TEXTS[kind], max_new_tokens=5, steps=2)
    assert isinstance(first, Result) and answer(first) == answer(again)


def test_template_code_in_a_text_is_only_text(server: Running) -> None:
    written, worked_out = (server.client.generate(t, max_new_tokens=1).usage for t in ("{{ 1000 * 10 }}", "10000"))
    assert written.prompt_tokens > worked_out.prompt_tokens


def test_text_that_is_no_unicode_is_refused_by_the_client(server: Running) -> None:
    with pytest.raises(InvalidArgument, match="cannot be sent"):
        server.client.generate("a\udc80b")


@pytest.mark.parametrize("text", ["a" * 3000, "word " * 2000, "é" * 1500, "\x00" * 1100, "x" * 300_000])
def test_a_prompt_too_long_is_refused(server: Running, text: str) -> None:
    with pytest.raises(InvalidArgument, match="1024") as raised:
        server.client.generate(text, max_new_tokens=4)
    assert fields(raised.value) == ["messages"]


def test_a_text_of_megabytes_is_refused_without_a_stage_looking_at_it(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turning ten megabytes into tokens would keep everybody else waiting for many seconds."""
    looked: list[int] = []
    encode = server.engine.stages.encoding.encode
    monkeypatch.setattr(
        server.engine.stages.encoding, "encode", lambda batch: (looked.append(len(batch)), encode(batch))[1]
    )
    with pytest.raises(InvalidArgument) as raised:
        server.client.generate("many words " * 200_000, max_new_tokens=4)
    assert fields(raised.value) == ["messages"]
    assert not looked


def test_a_prompt_that_leaves_no_room_for_the_answer_is_refused(server: Running) -> None:
    size = server.client.generate("hi", max_new_tokens=1).usage.prompt_tokens
    with pytest.raises(InvalidArgument, match="lower max_new_tokens") as raised:
        server.client.generate("hi", max_new_tokens=1024 - size + 1)
    assert fields(raised.value) == ["sampling.max_new_tokens"]
    fits = server.client.generate("hi", max_new_tokens=1024 - size, steps=1, block_length=1024)
    assert fits.usage.prompt_tokens == size and fits.forwards == 1


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "temperature below 0": ({"sampling": {"temperature": -0.1}}, ["sampling.temperature"]),
    "temperature NaN": ({"sampling": {"temperature": math.nan}}, ["sampling.temperature"]),
    "temperature infinite": ({"sampling": {"temperature": math.inf}}, ["sampling.temperature"]),
    "top_p 0": ({"sampling": {"top_p": 0.0}}, ["sampling.top_p"]),
    "top_p above 1": ({"sampling": {"top_p": 1.01}}, ["sampling.top_p"]),
    "top_p NaN": ({"sampling": {"top_p": math.nan}}, ["sampling.top_p"]),
    "no new tokens": ({"sampling": {"max_new_tokens": 0}}, ["sampling.max_new_tokens"]),
    "too many new tokens": ({"sampling": {"max_new_tokens": 1025}}, ["sampling.max_new_tokens"]),
    "4 billion new tokens": ({"sampling": {"max_new_tokens": 2**32 - 1}}, ["sampling.max_new_tokens"]),
    "an empty stop string": ({"sampling": {"stop": ["a", ""]}}, ["sampling.stop[1]"]),
    "100 stop strings": ({"sampling": {"stop": ["a"] * 100}}, ["sampling.stop"]),
    "no steps": ({"diffusion": {"steps": 0}}, ["diffusion.steps"]),
    "no block": ({"diffusion": {"block_length": 0}}, ["diffusion.block_length"]),
    "refresh 0": ({"diffusion": {"dkv_decode": {"refresh": 0}}}, ["diffusion.dkv_decode.refresh"]),
    "confidence 0": ({"diffusion": {"threshold": {"confidence": 0.0}}}, ["diffusion.threshold.confidence"]),
    "confidence ∞": ({"diffusion": {"threshold": {"confidence": math.inf}}}, ["diffusion.threshold.confidence"]),
    "confidence NaN": ({"diffusion": {"threshold": {"confidence": math.nan}}}, ["diffusion.threshold.confidence"]),
    "no messages": ({"messages": []}, ["messages"]),
    "no parts": ({"messages": [{"role": "ROLE_USER"}]}, ["messages[0].parts"]),
    "an empty part": ({"messages": [{"role": "ROLE_USER", "parts": [{}]}]}, ["messages[0].parts[0]"]),
    "no role": ({"messages": [{"parts": [{"text": "x"}]}]}, ["messages[0].role"]),
    "a role of the future": ({"messages": [{"role": 77, "parts": [{"text": "x"}]}]}, ["messages[0].role"]),
    "calls without results": (
        {
            "messages": [
                QUESTION,
                {"role": "ROLE_ASSISTANT", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
            ]
        },
        ["messages[1].tool_calls"],
    ),
    "an image of nothing": (
        {"messages": [{"role": "ROLE_USER", "parts": [{"image": {}}]}]},
        ["messages[0].parts[0].image"],
    ),
    "all at once": (
        {"messages": [], "sampling": {"top_p": 2.0, "temperature": -1.0}, "diffusion": {"steps": 0}},
        ["messages", "sampling.temperature", "sampling.top_p", "diffusion.steps"],
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_values_are_refused_with_every_field_named(server: Running, kind: str) -> None:
    change, expected = BAD[kind]
    with pytest.raises(InvalidArgument) as raised:
        raw(server, pb.GenerateRequest(**{"messages": [QUESTION], **change}))
    assert fields(raised.value) == expected


EXTREME: dict[str, dict[str, Any]] = {
    "the largest seed": {"seed": 2**64 - 1, "temperature": 1.0},
    "the largest top_k": {"top_k": 2**32 - 1, "temperature": 1.0},
    "one token to choose from": {"top_k": 1, "temperature": 1.0},
    "the smallest top_p": {"top_p": 5e-324, "temperature": 1.0},
    "the smallest temperature": {"temperature": 5e-324},
    "a tiny temperature": {"temperature": 1e-40},
    "the largest temperature": {"temperature": 1.7e308},
    "more steps than tokens": {"steps": 2**32 - 1},
    "the largest block": {"block_length": 2**32 - 1},
    "blocks of one": {"block_length": 1},
    "the rarest refresh": {"recompute": DkvDecode(2**32 - 1)},
    "the smallest confidence": {"commit": Threshold(5e-324)},
    "full confidence": {"commit": Threshold(1.0)},
    "steps with a threshold": {"steps": 1, "commit": Threshold(0.9)},
    "the longest stop string": {"stop": "x" * 1024},
    "16 stop strings": {"stop": [chr(0x4E00 + i) for i in range(16)]},
}


@pytest.mark.parametrize("kind", EXTREME)
def test_extreme_values_are_answered(server: Running, kind: str) -> None:
    given = {"max_new_tokens": 6, **EXTREME[kind]}
    first = server.client.generate("How many shapes are there?", **given)
    assert 1 <= first.forwards <= 6
    assert answer(first) == answer(server.client.generate("How many shapes are there?", **given))


def test_one_token_to_choose_from_is_greedy(server: Running) -> None:
    greedy = server.client.generate("How many shapes are there?", max_new_tokens=6)
    for only in ({"top_k": 1}, {"top_p": 1e-9}):
        drawn = server.client.generate("How many shapes are there?", max_new_tokens=6, temperature=1.0, seed=9, **only)
        assert answer(drawn) == answer(greedy)


def test_an_unknown_model_is_not_found(server: Running) -> None:
    with pytest.raises(NotFound, match="no model 'gpt' here; there is bundled"):
        server.client.generate("x", model="gpt")
    with pytest.raises(NotFound, match="bundled"):
        server.client.describe("gpt")
    with pytest.raises(NotFound):
        raw(server, pb.GenerateRequest(model="\x00" * 500, messages=[QUESTION]))
    assert server.client.generate("x", model="bundled", max_new_tokens=2).forwards


@pytest.mark.parametrize(("option", "field"), [("recompute", "diffusion.recompute"), ("commit", "diffusion.commit")])
def test_an_unknown_policy_is_refused_by_client_and_engine(server: Running, option: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        server.client.generate("x", **{option: "fastest"})
    assert fields(raised.value) == [field]
    asked = Request(
        id="unknown policy",
        model="bundled",
        messages=(Message("user", (TextPart("x"),)),),
        diffusion=Diffusion(**{option: Policy(name="fastest")}),
    )
    with pytest.raises(InvalidArgument, match="fastest") as raised:
        server.engine.submit(asked, lambda event: None)
    assert fields(raised.value) == [field]


def test_bytes_that_are_no_message_are_refused(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream("/mmserve.v1.GenerationService/Generate")(b"\xff\xfe no protobuf", timeout=PATIENCE)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
    assert isinstance(from_rpc_error(raised.value), MMServeError)


def test_fields_of_the_future_are_ignored(server: Running) -> None:
    message = pb.GenerateRequest(messages=[QUESTION], sampling={"max_new_tokens": 2})
    later = pb.GenerateRequest.FromString(message.SerializeToString() + b"\x9a\x06\x04soon")
    assert raw(server, later)[-1].WhichOneof("event") == "finished"


@pytest.mark.parametrize("timeout", [1e6, 1e9, 1e11])
def test_a_deadline_in_the_far_future_is_no_deadline(server: Running, timeout: float) -> None:
    assert server.client.generate("x", max_new_tokens=2, timeout=timeout).forwards


@pytest.mark.parametrize("seconds", [1e7, 1e10, 1e15])
def test_the_engine_takes_deadlines_in_the_far_future(server: Running, seconds: float) -> None:
    """gRPC lets a client ask for more seconds than a queue can wait for."""
    ended = threading.Event()
    events: list[Any] = []

    def sink(event: Any) -> None:
        events.append(event)
        if isinstance(event, Finished | Failed):
            ended.set()

    far = Request(
        id=f"far {seconds}",
        model="bundled",
        messages=(Message("user", (TextPart("x"),)),),
        deadline=time.monotonic() + seconds,
    )
    server.engine.submit(far, sink)
    assert ended.wait(PATIENCE)
    assert isinstance(events[-1], Finished), events[-1]


def test_a_deadline_that_has_passed_is_refused(server: Running) -> None:
    with pytest.raises(DeadlineExceeded):
        server.client.generate("x", timeout=1e-9)
    with pytest.raises(InvalidArgument, match="timeout"):
        server.client.generate("x", timeout=0)
