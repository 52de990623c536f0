"""Earliest deadline first: within a tenant and a class, nobody waits for ever, tenants keep their shares, and running
decodes do not wait for prefills."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config import EngineConfig, from_mapping
from mmserve.core.plan import Budgets, Entry
from mmserve.core.request import Message, Request, Sampling, Stage, TextPart
from mmserve.core.slo import SLO
from mmserve.core.tenant import Tenant
from mmserve.engine.waiting import WaitingQueue
from mmserve.errors import ConfigError, ResourceExhausted
from mmserve.schedule.deadlines import LATEST_SECONDS, USUAL_PER_TOKEN, due, pace
from mmserve.schedule.expected_wait import PROMPT_WORK, Measured, work_of
from mmserve.schedule.scheduler import schedule

ALL = frozenset({"constrain", "load", "tokenize", "encode", "prefill", "decode"})
BUDGETS = Budgets(
    idle=ALL,
    free_pages=1000,
    max_pending_per_stage=1000,
    max_running=1000,
    encode_batch=1,
    prefill_tokens=1,
    decode_tokens=1,
    load=1,
)
CLASSES = (None, SLO(name="fast", first_token_seconds=0.5, per_token_seconds=0.05), SLO(name="slow"))

times = st.floats(0, 1000, allow_nan=False)


@given(times, st.none() | times, st.sampled_from(CLASSES))
def test_everybody_is_due_some_time(arrived: float, deadline: float | None, slo: SLO | None) -> None:
    when = due(arrived, deadline, slo)
    assert when <= arrived + LATEST_SECONDS
    wanted = [t for t in (deadline, arrived + 0.5 if slo and slo.name == "fast" else None) if t is not None]
    assert when == min([arrived + LATEST_SECONDS, *wanted])


@pytest.mark.parametrize(
    ("per_token", "expected"), [(0.0, 1.0), (USUAL_PER_TOKEN, 1.0), (5.0, 1.0), (0.05, 0.25), (1e-6, 1 / 16)]
)
def test_pace_is_in_proportion_to_the_time_a_token(per_token: float, expected: float) -> None:
    assert pace(SLO(per_token_seconds=per_token)) == pytest.approx(expected)
    assert pace(None) == 1.0


#: Where requests wait for a stage, and what makes them wait there.
WAITS = {
    "tokenize": {"stage": Stage.QUEUED},
    "load": {"stage": Stage.QUEUED, "images": 1},
    "constrain": {"stage": Stage.QUEUED, "constrained": True},
    "encode": {"stage": Stage.LOADED, "images": 1},
    "prefill": {"stage": Stage.ENCODED, "tokens": 5, "pages": 1},
}


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from((0, 0, 1))), min_size=1, max_size=12), st.data())
def test_a_tenant_is_served_by_class_and_then_by_due_time(waiting: list[tuple[int, int]], data: st.DataObject) -> None:
    stage = data.draw(st.sampled_from(sorted(WAITS)))
    entries = [Entry(f"{i}", due=when, priority=p, **WAITS[stage]) for i, (when, p) in enumerate(waiting)]
    expected = [e.id for e in sorted(entries, key=lambda e: (e.priority, e.due))]  # else as they arrived
    order = []
    while entries:
        [first] = getattr(schedule(entries, BUDGETS), stage)[:1]
        order.append(first)
        entries = [e for e in entries if e.id != first]
    assert order == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_a_prefill_that_is_begun_goes_first(dues: list[int]) -> None:
    """It holds its pages already: another tenant's deadline, or its own tenant's, does not make it hold them longer."""
    new = [Entry(f"{i}", Stage.ENCODED, tokens=5, pages=1, due=when) for i, when in enumerate(dues)]
    begun = Entry("begun", Stage.ENCODED, tokens=5, pages=1, due=10.0, prefilled=2)
    assert schedule([*new, begun], dataclasses.replace(BUDGETS, chunked=True)).prefill == ("begun",)


def test_a_request_is_overtaken_only_by_those_that_arrive_before_it_is_due() -> None:
    """A request a second with a target of a second, and a place a second: the one without a target has its turn."""
    fast = SLO(name="fast", first_token_seconds=1.0)
    waiting = [Entry("patient", Stage.QUEUED, due=due(0.0, None, None))]
    for second in range(200):
        waiting.append(Entry(f"{second}", Stage.QUEUED, due=due(second, None, fast)))
        [first] = schedule(waiting, BUDGETS).tokenize
        waiting = [e for e in waiting if e.id != first]
        if first == "patient":
            assert LATEST_SECONDS - 2 <= second <= LATEST_SECONDS
            return
    pytest.fail("it never had its turn")


@given(st.integers(1, 60), st.randoms(use_true_random=False))
def test_early_deadlines_take_nothing_from_another_tenant(rounds: int, random: object) -> None:
    """One tenant is always due first; each has half of what is served, up to one request."""
    entries = [
        Entry(f"{who}{i}", Stage.QUEUED, tenant=who, due=float(i) if who == "hasty" else 1000.0 + i)
        for i in range(rounds)
        for who in ("calm", "hasty")
    ]
    budgets, served = BUDGETS, Counter[str]()
    for _ in range(rounds):
        plan = schedule(entries, budgets)
        [first] = plan.tokenize
        budgets = dataclasses.replace(budgets, served=plan.served)
        served[next(e.tenant for e in entries if e.id == first)] += 1
        entries = [e for e in entries if e.id != first]
        assert abs(served["calm"] - served["hasty"]) <= 1


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(1 / 16, 1)), min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 99)), max_size=8),
)
def test_running_decodes_do_not_wait_for_prefills(
    running: list[tuple[int, float]], waiting: list[tuple[int, int]]
) -> None:
    """Whatever waits for prefill, and however soon it is due, the same decode steps are taken."""
    decoding = [Entry(f"d{i}", Stage.READY, rows=rows, pace=p, turn=i) for i, (rows, p) in enumerate(running)]
    prompts = [Entry(f"p{i}", Stage.ENCODED, tokens=t, pages=1, due=when) for i, (t, when) in enumerate(waiting)]
    budgets = dataclasses.replace(BUDGETS, decode_tokens=60, prefill_tokens=60, chunked=True)
    plan = schedule([*prompts, *decoding], budgets)
    assert plan.decode and plan.decode == schedule(decoding, budgets).decode
    rows = sum(min(60, e.tokens) for e in prompts if e.id in plan.prefill)
    assert rows <= 60, "and a chunk is no longer than its budget"


def test_steps_are_shared_out_by_pace() -> None:
    """Of 1,000 steps, one at a time, a class that wants tokens four times as fast has four fifths; nobody starves."""
    entries = {"quick": Entry("quick", Stage.READY, rows=10, pace=0.25), "usual": Entry("usual", Stage.READY, rows=10)}
    budgets, steps = dataclasses.replace(BUDGETS, decode_tokens=10), Counter[str]()
    for _ in range(1000):
        plan = schedule(list(entries.values()), budgets)
        [one] = plan.decode
        steps[one] += 1
        entries[one] = dataclasses.replace(entries[one], turn=plan.turns[one])
        budgets = dataclasses.replace(budgets, now=plan.now)
    assert 0.75 <= steps["quick"] / 1000 <= 0.85


# --- admission ---


def request(slo: SLO | None = None) -> Request:
    chat = (Message("user", (TextPart("?"),)),)
    return Request(id="r", model="m", messages=chat, sampling=Sampling(max_new_tokens=100 - PROMPT_WORK), slo=slo)


def busy_queue() -> WaitingQueue:
    """A queue that is known to serve 100 units of work a second; four requests of a minute's patience wait."""
    queue = WaitingQueue(EngineConfig())
    queue.refusal = ""
    queue._measured = Measured(work=1000.0, seconds=10.0)
    for i in range(4):
        queue.take(request(), 1060.0 + i, of_session=False)
    return queue


def test_what_cannot_make_its_target_is_refused() -> None:
    queue, slow = busy_queue(), SLO(name="slow", first_token_seconds=3.0)
    with pytest.raises(ResourceExhausted, match=r"about 4\.0 seconds to start; .* the class 'slow' \(3\)") as caught:
        queue.take(request(slow), 2000.0, of_session=False)
    assert caught.value.retry_after and queue.shed == 1 and queue.queued == 4
    queue.take(request(), 2000.0, of_session=False)
    queue.take(request(SLO(name="calm", first_token_seconds=6.0)), 2001.0, of_session=False)


def test_what_is_due_later_does_not_count_against_it() -> None:
    queue, fast = busy_queue(), SLO(name="fast", first_token_seconds=1.5)
    queue.take(request(fast), 1001.5, of_session=False)  # before all four
    queue.take(request(fast), 1001.6, of_session=False)  # after one of a second
    with pytest.raises(ResourceExhausted):
        queue.take(request(fast), 1001.7, of_session=False)
    for when in (1001.5, 1001.6, 1060.0, 1061.0, 1062.0, 1063.0):
        queue.remove(Tenant(), 1, 100, when)
    assert queue.queued == 0 and queue._due == {} and queue.expected_wait() == 0.0


def test_requests_for_one_token_predict_the_wait_for_longer_ones() -> None:
    """The rate of scores of prompts, twenty a second, is not a rate of twenty tokens a second."""
    queue = WaitingQueue(EngineConfig())
    queue.refusal = ""
    queue._measured = Measured(work=20.0 * work_of(1), seconds=1.0)
    for i in range(20):
        queue.take(dataclasses.replace(request(), sampling=Sampling(max_new_tokens=64)), 1060.0 + i, of_session=False)
    assert queue.expected_wait() < 5, "not the 64 seconds of 20 × 64 tokens"


# --- configuration ---


def test_classes_are_read_from_a_configuration() -> None:
    read = from_mapping({"slo": {"chat": {"first_token_seconds": 1, "per_token_seconds": 0.05}}})
    assert read.slo == (SLO(name="chat", first_token_seconds=1.0, per_token_seconds=0.05),)
    for wrong, text in (
        ({"slo": {"chat": {}}}, r"\[slo.chat\] needs first_token_seconds, per_token_seconds or both"),
        ({"slo": {"chat": {"first_token_seconds": -1}}}, r"\[slo.chat\] first_token_seconds must be at least 0"),
        ({"slo": {"chat": {"ttft": 1}}}, r"\[slo.chat\] has no key 'ttft'"),
        ({"slo": {"chat": {"name": "x"}}}, r"\[slo.chat\] has no key 'name'"),
        ({"slo": [1]}, r"each under \[slo.NAME\]"),
    ):
        with pytest.raises(ConfigError, match=text):
            from_mapping(wrong)
