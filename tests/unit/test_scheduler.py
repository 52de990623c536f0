"""The scheduler: first come, first served, within every budget, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.plan import Budgets, Entry, Plan
from mmserve.core.request import RUNNING, TERMINAL, Stage, advance
from mmserve.schedule.scheduler import schedule

STAGES = {
    "constrain": Stage.CONSTRAINING,
    "load": Stage.LOADING,
    "tokenize": Stage.ENCODING,
    "encode": Stage.ENCODING,
    "prefill": Stage.PREFILLING,
    "decode": Stage.STEPPING,
}
HOLDS_PAGES = {Stage.PREFILLING, Stage.PREFILLED, Stage.STEPPING, Stage.READY}
ALL_IDLE = frozenset(STAGES)


def budgets(**changes: object) -> Budgets:
    base = Budgets(
        idle=ALL_IDLE,
        free_pages=1000,
        max_pending_per_stage=8,
        max_running=64,
        encode_batch=8,
        prefill_tokens=2048,
        decode_tokens=4096,
    )
    return dataclasses.replace(base, **changes)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Entry], Budgets]:
    """Any table of live requests and any budgets, whether or not the engine would ever get there."""
    entries = [
        Entry(
            f"r{index}",
            draw(st.sampled_from([s for s in Stage if s not in TERMINAL])),
            images=draw(st.integers(0, 5)),
            tokens=draw(st.integers(0, 50)),
            pages=draw(st.integers(0, 12)),
            turn=draw(st.integers(0, 6)),
            rows=draw(st.integers(0, 50)),
            constrained=draw(st.booleans()),
        )
        for index in range(draw(st.integers(0, 14)))
    ]
    idle = frozenset(draw(st.sets(st.sampled_from(sorted(STAGES)))))
    long = draw(st.sets(st.sampled_from(["prefill", "decode"]))) - idle
    limits = Budgets(
        idle=idle,
        free_pages=draw(st.integers(0, 40)),
        max_pending_per_stage=draw(st.integers(1, 6)),
        max_running=draw(st.integers(1, 10)),
        encode_batch=draw(st.integers(1, 10)),
        prefill_tokens=draw(st.integers(0, 120)),
        decode_tokens=draw(st.integers(0, 120)),
        constrain=draw(st.integers(0, 3)),
        load=draw(st.integers(0, 3)),
        within={name: draw(st.integers(1, 200)) for name in sorted(long)},
    )
    return entries, limits


def _prefix(planned: tuple[str, ...], candidates: list[Entry]) -> list[Entry]:
    """The planned entries, checked to be the first of ``candidates`` in their order."""
    taken = candidates[: len(planned)]
    assert planned == tuple(e.id for e in taken)
    return taken


def check(entries: list[Entry], limits: Budgets, plan: Plan) -> None:
    """Every promise of a single plan."""
    for name in STAGES:
        free = name in limits.idle or name in limits.within
        assert free or getattr(plan, name) == (), f"planned for a busy {name} worker"
    in_stage = {stage: [e for e in entries if e.stage is stage] for stage in Stage}

    unready = [e for e in in_stage[Stage.QUEUED] if e.constrained]
    constrain = _prefix(plan.constrain, unready)
    waiting = len(in_stage[Stage.CONSTRAINING]) + len(in_stage[Stage.CONSTRAINED])
    room = min(limits.constrain, max(0, limits.max_pending_per_stage - waiting))
    assert len(constrain) == (min(len(unready), room) if "constrain" in limits.idle else 0)

    ready = [e for e in entries if e.stage in (Stage.QUEUED, Stage.CONSTRAINED) and e not in unready]
    media, text = [e for e in ready if e.images], [e for e in ready if not e.images]
    load = _prefix(plan.load, media)
    waiting = len(in_stage[Stage.LOADING]) + len(in_stage[Stage.LOADED])
    room = min(limits.load, max(0, limits.max_pending_per_stage - waiting))
    assert len(load) == (min(len(media), room) if "load" in limits.idle else 0)

    tokenize = _prefix(plan.tokenize, text)
    encode = _prefix(plan.encode, in_stage[Stage.LOADED])
    assert len(tokenize) <= limits.encode_batch
    assert len(encode) <= 1 or sum(e.images for e in encode) <= limits.encode_batch
    for taken, of_media in ((tokenize, False), (encode, True)):
        waiting = len(in_stage[Stage.ENCODED]) + sum(bool(e.images) is of_media for e in in_stage[Stage.ENCODING])
        assert not taken or waiting + len(taken) <= limits.max_pending_per_stage

    encoded = in_stage[Stage.ENCODED]
    if "prefill" in limits.idle:
        prefill = _prefix(plan.prefill, encoded)
        assert len(prefill) <= 1 or sum(e.tokens for e in prefill) <= limits.prefill_tokens
    else:
        most = min(limits.prefill_tokens, limits.within.get("prefill", 0))
        prefill = _prefix(plan.prefill, [e for e in encoded if e.tokens <= most])
        assert sum(e.tokens for e in prefill) <= most
    assert sum(e.pages for e in prefill) <= limits.free_pages
    holding = sum(e.stage in HOLDS_PAGES for e in entries)
    assert not prefill or holding + len(prefill) <= limits.max_running
    waiting = len(in_stage[Stage.PREFILLING]) + len(in_stage[Stage.PREFILLED])
    assert not prefill or waiting + len(prefill) <= limits.max_pending_per_stage

    ready = [e for e in entries if e.stage in (Stage.PREFILLED, Stage.READY)]
    in_turn = sorted(ready, key=lambda e: (e.turn, entries.index(e)))
    if "decode" in limits.idle:
        decode = _prefix(plan.decode, in_turn)
        assert len(decode) <= 1 or sum(e.rows for e in decode) <= limits.decode_tokens
        assert bool(decode) == bool(ready)
    else:
        most = min(limits.decode_tokens, limits.within.get("decode", 0))
        short = [e for e in in_turn if e.rows <= most]
        decode = _prefix(plan.decode, short)
        assert sum(e.rows for e in decode) <= most
        assert bool(decode) == (bool(short) and "decode" in limits.within)


@given(tables())
def test_a_plan_keeps_every_budget_and_the_order_of_arrival(case: tuple[list[Entry], Budgets]) -> None:
    entries, limits = case
    check(entries, limits, schedule(entries, limits))


@given(tables())
def test_scheduling_is_pure(case: tuple[list[Entry], Budgets]) -> None:
    entries, limits = case
    before = list(entries)
    assert schedule(entries, limits) == schedule(tuple(entries), limits)
    assert entries == before


@given(tables(), st.integers(0, 50))
def test_a_request_that_arrives_later_never_changes_who_is_encoded_or_prefilled(
    case: tuple[list[Entry], Budgets], tokens: int
) -> None:
    entries, limits = case
    plan = schedule(entries, limits)
    later = schedule([*entries, Entry("late", Stage.QUEUED, images=1, tokens=tokens, pages=1)], limits)
    assert later.load[: len(plan.load)] == plan.load
    assert (later.tokenize, later.encode) == (plan.tokenize, plan.encode)
    assert (later.prefill, later.decode) == (plan.prefill, plan.decode)


def test_a_single_request_larger_than_a_budget_runs_alone() -> None:
    big = {"images": 50, "tokens": 9000, "pages": 9, "rows": 9000}
    small = {"images": 1, "tokens": 1, "pages": 1, "rows": 1}
    limits = budgets()
    for stage, name in ((Stage.LOADED, "encode"), (Stage.ENCODED, "prefill"), (Stage.READY, "decode")):
        plan = schedule([Entry("big", stage, **big), Entry("small", stage, **small)], limits)
        assert getattr(plan, name) == ("big",)


def test_batches_are_filled_up_to_their_budget() -> None:
    queued = [Entry(f"q{i}", Stage.QUEUED) for i in range(8)]
    assert schedule(queued, budgets(encode_batch=5)).tokenize == ("q0", "q1", "q2", "q3", "q4")
    loaded = [Entry(f"l{i}", Stage.LOADED, images=1 + i % 2) for i in range(8)]
    assert schedule(loaded, budgets(encode_batch=5)).encode == ("l0", "l1", "l2")
    encoded = [Entry(f"e{i}", Stage.ENCODED, tokens=10, pages=1) for i in range(8)]
    assert schedule(encoded, budgets(prefill_tokens=30)).prefill == ("e0", "e1", "e2")
    assert schedule(encoded, budgets(prefill_tokens=30, free_pages=2)).prefill == ("e0", "e1")
    ready = [Entry(f"d{i}", Stage.READY, rows=10) for i in range(8)]
    assert schedule(ready, budgets(decode_tokens=45)).decode == ("d0", "d1", "d2", "d3")


def test_a_prompt_that_is_prefilled_without_its_answer_costs_its_own_rows() -> None:
    """Of a next-token model the masked answer is not run: more prompts fit into a pass."""
    entries = [Entry(str(i), Stage.ENCODED, tokens=76, pages=1, first_rows=28) for i in range(4)]
    limits = budgets(prefill_tokens=100, free_pages=10)
    assert schedule(entries, limits).prefill == ("0", "1", "2")
    assert schedule([dataclasses.replace(e, first_rows=None) for e in entries], limits).prefill == ("0",)
    begun = dataclasses.replace(entries[3], prefilled=20)
    assert schedule([*entries[:3], begun], limits).prefill == ("3", "0", "1", "2"), "8 rows are left of it"


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    entries = [Entry("big", Stage.ENCODED, tokens=10, pages=6), Entry("small", Stage.ENCODED, tokens=1, pages=1)]
    assert schedule(entries, budgets(free_pages=5)).prefill == ()
    assert schedule(entries, budgets(free_pages=6)).prefill == ("big",)
    assert schedule(entries, budgets(free_pages=7)).prefill == ("big", "small")


def test_decode_takes_whoever_was_due_first() -> None:
    entries = [
        Entry("recent", Stage.READY, rows=10, turn=9),
        Entry("old", Stage.READY, rows=10, turn=4),
        Entry("older", Stage.READY, rows=10, turn=2),
        Entry("running", Stage.STEPPING, rows=10, turn=1),
    ]
    assert schedule(entries, budgets(decode_tokens=20)).decode == ("older", "old")


def test_encode_stops_where_the_handover_to_prefill_is_full() -> None:
    waiting = [Entry(f"w{i}", Stage.ENCODED, tokens=1, pages=1) for i in range(3)]
    queued = [Entry(f"q{i}", Stage.QUEUED) for i in range(3)]
    loaded = [Entry(f"l{i}", Stage.LOADED, images=1) for i in range(3)]
    for name, ready in (("tokenize", queued), ("encode", loaded)):
        assert getattr(schedule([*waiting, *ready], budgets(max_pending_per_stage=3)), name) == ()
        assert getattr(schedule([*waiting, *ready], budgets(max_pending_per_stage=4)), name) == (ready[0].id,)


def test_text_waits_neither_for_media_nor_for_the_tower() -> None:
    """However many media are read, wait for the tower or are in it."""
    busy = [Entry(f"m{i}", stage, images=9) for i, stage in enumerate([Stage.LOADING] * 8 + [Stage.ENCODING] * 8)]
    waiting = [Entry(f"w{i}", Stage.QUEUED, images=1) for i in range(8)]
    text = Entry("text", Stage.QUEUED)
    idle = ALL_IDLE - {"load", "encode"}
    assert schedule([*busy, *waiting, text], budgets(idle=idle)).tokenize == ("text",)


@dataclass
class Job:
    """A request of the simulation."""

    entry: Entry
    arrives: int
    steps: int


def simulate(jobs: list[Job], limits: Budgets, total_pages: int, seed: int) -> dict[str, list[str]]:
    """Run ``jobs`` to completion with stages that take random times; the order of entry into each stage."""
    rng = random.Random(seed)
    table: dict[str, Entry] = {}
    left = {job.entry.id: job.steps for job in jobs}
    running: dict[str, tuple[tuple[str, ...], int]] = {}
    order: dict[str, list[str]] = {name: [] for name in STAGES}
    free, now = total_pages, 0
    unarrived = sorted(jobs, key=lambda j: j.arrives)
    # Each job needs a grammar, its media, an encode, a prefill and its steps, each at most 3 ticks long, never idle
    # without cause.
    bound = 3 * sum(job.steps + 4 for job in jobs) + max((j.arrives for j in jobs), default=0) + 3
    while unarrived or table:
        while unarrived and unarrived[0].arrives <= now:
            job = unarrived.pop(0)
            table[job.entry.id] = job.entry
        now_limits = dataclasses.replace(limits, idle=ALL_IDLE - running.keys(), free_pages=free)
        entries = list(table.values())
        plan = schedule(entries, now_limits)
        check(entries, now_limits, plan)
        limits = dataclasses.replace(limits, now=plan.now)
        for name, stage in STAGES.items():
            ids = getattr(plan, name)
            for i in ids:
                turn = plan.turns[i] if name == "decode" else plan.now  # newcomers to decode begin at its clock
                table[i] = dataclasses.replace(table[i], stage=advance(table[i].stage, stage), turn=turn)
                free -= table[i].pages if name == "prefill" else 0
                if name != "decode" or i not in order["decode"]:
                    order[name].append(i)
            if ids:
                running[name] = (ids, now + rng.randint(1, 3))
        assert free >= 0
        assert running or not table, f"nothing runs although {list(table)} wait"
        now += 1
        for name in [n for n, (_ids, until) in running.items() if until <= now]:
            for i in running.pop(name)[0]:
                if name == "decode":
                    left[i] -= 1
                    if not left[i]:
                        free += table.pop(i).pages
                        continue
                following = {
                    "constrain": Stage.CONSTRAINED,
                    "load": Stage.LOADED,
                    "tokenize": Stage.ENCODED,
                    "encode": Stage.ENCODED,
                    "prefill": Stage.PREFILLED,
                    "decode": Stage.READY,
                }[name]
                table[i] = dataclasses.replace(table[i], stage=advance(table[i].stage, following))
        assert now <= bound, f"{list(table)} starve"
    assert free == total_pages
    assert not any(e.stage in RUNNING for e in table.values())
    return order


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Job], Budgets, int]:
    total_pages = draw(st.integers(1, 30))
    jobs = []
    for index in range(draw(st.integers(1, 12))):
        entry = Entry(
            f"r{index}",
            Stage.QUEUED,
            images=draw(st.integers(0, 4)),
            tokens=draw(st.integers(1, 60)),
            rows=draw(st.integers(1, 60)),
            pages=draw(st.integers(1, total_pages)),  # the engine refuses what could never fit
            constrained=draw(st.integers(0, 3)) == 3,
        )
        arrives = max([j.arrives for j in jobs[-1:]], default=0) + draw(st.integers(0, 4))
        jobs.append(Job(entry, arrives, draw(st.integers(1, 8))))
    limits = budgets(
        max_pending_per_stage=draw(st.integers(1, 4)),
        max_running=draw(st.integers(1, 6)),
        encode_batch=draw(st.integers(1, 6)),
        prefill_tokens=draw(st.integers(1, 150)),
        decode_tokens=draw(st.integers(1, 150)),
    )
    return jobs, limits, total_pages


@given(workloads(), st.integers(0, 1000))
def test_every_workload_runs_to_its_end_in_order_of_arrival(case: tuple, seed: int) -> None:
    jobs, limits, total_pages = case
    order = simulate(jobs, limits, total_pages, seed)
    arrival = [job.entry.id for job in jobs]
    assert order["constrain"] == [job.entry.id for job in jobs if job.entry.constrained]
    for media in (False, True):
        # who waits for a grammar, or for media, may be overtaken, but not by one that waits for the same
        for constrained in (False, True):
            alike = [j.entry.id for j in jobs if (bool(j.entry.images), j.entry.constrained) == (media, constrained)]
            for name in ("load", "encode", "prefill") if media else ("tokenize", "prefill"):
                assert [i for i in order[name] if i in alike] == alike
    assert sorted(order["decode"]) == sorted(arrival)


@pytest.mark.parametrize("seed", range(5))
def test_requests_that_each_need_all_pages_take_turns(seed: int) -> None:
    jobs = [Job(Entry(f"r{i}", Stage.QUEUED, tokens=100, pages=10, rows=100), 0, 3) for i in range(6)]
    order = simulate(jobs, budgets(max_pending_per_stage=1, max_running=1), 10, seed)
    assert order["prefill"] == order["decode"] == [f"r{i}" for i in range(6)]


def test_a_prompt_whose_clip_is_still_read_waits_and_keeps_nobody_waiting() -> None:
    """Neither the place of another that waits for prefill, nor the turn; what it holds counts."""
    limits = Budgets(
        idle=frozenset({"tokenize", "encode", "prefill"}), free_pages=2, max_pending_per_stage=2, max_running=2,
        encode_batch=8, prefill_tokens=64, decode_tokens=64, chunked=True,
    )  # fmt: skip
    reading = [Entry(f"r{i}", Stage.ENCODED, 60, 700, 50, prefilled=64 if i else None, awaits=True) for i in range(2)]
    ready = Entry("ready", Stage.ENCODED, tokens=16, pages=1)
    plan = schedule([*reading, ready, Entry("text", Stage.QUEUED), Entry("l", Stage.LOADED, 1)], limits)
    assert (plan.prefill, plan.tokenize, plan.encode) == (("ready",), ("text",), ("l",))
    full = schedule([reading[1], dataclasses.replace(reading[1], id="other"), ready], limits)
    assert full.prefill == (), "both places are held by those that are read"
    come = schedule([dataclasses.replace(reading[1], awaits=False), ready], limits)
    assert come.prefill[0] == "r1"
