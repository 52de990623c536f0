"""Bodies of completions: the answer ends with a suffix, which takes room of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from mmserve.core.events import CommittedToken, Finished, StageTimes, Usage
from mmserve.http.completions import Completions
from mmserve.rpc.violations import MAX_STOP_CHARACTERS

MOST = (1 << 32) - 1


def test_the_largest_room_before_a_suffix_is_left_to_the_model_to_refuse() -> None:
    asked = Completions().read({"model": "m", "prompt": "a", "suffix": "b", "max_tokens": MOST})
    assert asked.message.sampling.max_new_tokens == MOST


def finished(text: str, holes: tuple[str, ...] = ()) -> Finished:
    tokens = tuple(CommittedToken(i, c, -0.5, 0, (), c.encode()) for i, c in enumerate(text))
    times = StageTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    return Finished("end", text, Usage(1, 0, len(text)), 1, 0, times, holes=holes, tokens=tokens)


async def choices_of(reply: Any, one: Finished) -> list[dict[str, Any]]:
    async def events() -> AsyncIterator[Finished]:
        yield one

    lines = [line async for line in reply.lines(events())]
    return [json.loads(line.removeprefix("data: ").split("\n\n")[0])["choices"][0] for line in lines]


@pytest.mark.parametrize("fim", [False, True])
@pytest.mark.parametrize(("gap", "suffix"), [("", "cd"), ("ab", "cd"), ("äb", "c"), ("ab", "")])
def test_log_probabilities_are_of_the_text_before_the_suffix(fim: bool, gap: str, suffix: str) -> None:
    body = {"model": "m", "prompt": "a", "logprobs": 0, **({"suffix": suffix} if suffix else {})}
    reply = Completions(fim=fim).read(body).reply
    one = finished(gap + suffix, (gap,) if suffix else ())
    [whole] = reply.whole([one])["choices"]
    [last] = asyncio.run(choices_of(reply, one))
    for choice in (whole, last):
        found = choice["logprobs"]
        if fim:
            assert [each["token"] for each in found["content"]] == list(gap)
        else:
            assert found["tokens"] == list(gap) and len(found["token_logprobs"]) == len(gap)
    plain = Completions(fim=fim).read({"model": "m", "prompt": "a"}).reply.whole([one])
    assert plain["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("gap", "suffix", "stop", "decoded", "expected"),
    [
        ("ab", "cd", ["x"], ["x"], "ab"),
        ("ab", "xb", ["x"], ["x"], "ab"),  # the suffix begins with it
        ("ab", "bx", ["x"], [], "ab"),
        ("axb", "bx", ["x"], [], "a"),
        ("ab", "cd", ["bc"], [], "ab"),  # across the boundary
        ("abc", "cd", ["bc", "x"], ["x"], "a"),
        ("abcb", "cd", ["bcd", "x"], ["x"], "abcb"),
        ("a\n", "\nb", ["\n\n"], [], "a\n"),
    ],
)
def test_a_stop_string_ends_the_gap_and_not_the_suffix(
    gap: str, suffix: str, stop: list[str], decoded: list[str], expected: str
) -> None:
    """Those that could also occur with the suffix are no stop strings of the decoding."""
    asked = Completions().read({"model": "m", "prompt": "a", "suffix": suffix, "stop": stop})
    assert asked.message.sampling.stop == decoded
    one = finished(gap + suffix, (gap,))
    [whole] = asked.reply.whole([one])["choices"]
    [last] = asyncio.run(choices_of(asked.reply, one))
    by = None if expected == gap else next(each for each in stop if gap.find(each) == len(expected))
    assert [(each["text"], each["finish_reason"], each["stop_reason"]) for each in (whole, last)] == [
        (expected, "stop", by)
    ] * 2


def test_stop_strings_that_are_too_long_are_not_compared_with_a_suffix() -> None:
    """They are refused; comparing megabytes took minutes on the event loop."""
    for stop in ("b" * MAX_STOP_CHARACTERS, "b" * (MAX_STOP_CHARACTERS + 1)):
        asked = Completions().read({"model": "m", "prompt": "a", "suffix": "b" * 100, "stop": stop})
        assert list(asked.message.sampling.stop) == ([] if len(stop) <= MAX_STOP_CHARACTERS else [stop])


def test_a_text_that_a_stop_string_ends_has_all_before_it() -> None:
    """Also what is equal to the beginning of the suffix."""
    reply = Completions().read({"model": "m", "prompt": "a", "suffix": "bc", "stop": "x"}).reply
    [whole] = reply.whole([replace(finished("ab"), reason="stop", stop="x")])["choices"]
    assert (whole["text"], whole["stop_reason"]) == ("ab", "x")


@pytest.mark.parametrize(("most", "end"), [(2, ("length", None)), (3, ("stop", "x"))])
def test_a_full_gap_before_a_suffix_that_begins_with_a_stop_string_ends_by_its_length(
    most: int, end: tuple[str, str | None]
) -> None:
    reply = Completions().read({"model": "m", "prompt": "a", "suffix": "xb", "stop": "x", "max_tokens": most}).reply
    one = replace(finished("ab"), reason="stop", stop="x")
    [whole] = reply.whole([one])["choices"]
    [last] = asyncio.run(choices_of(reply, one))
    assert [(each["text"], each["finish_reason"], each["stop_reason"]) for each in (whole, last)] == [("ab", *end)] * 2
    within = replace(one, tokens=(one.tokens[0], replace(one.tokens[1], text="bx", text_bytes=b"bx")))
    assert reply.whole([within])["choices"][0]["stop_reason"] == "x", "in the last token of the gap"


def test_an_answer_that_was_shortened_to_end_within_its_budget_is_reported() -> None:
    reply = Completions().read({"model": "m", "prompt": ["a", "b"], "guided_regex": "[ab]*"}).reply
    whole, cut = finished("ab"), replace(finished("ab"), sample=1, closed_by_budget=True)
    for done, closed in (([whole, replace(whole, sample=1)], False), ([whole, cut], True)):
        found = reply.whole(done)
        assert found["mmserve"]["closed_by_budget"] is closed
        assert [choice["finish_reason"] for choice in found["choices"]] == ["stop", "stop"]
