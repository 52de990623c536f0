"""Fair queueing: shares are kept over time, nobody starves, no place is left empty, and each tenant keeps its order."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from mmserve.core.plan import Budgets, Entry, Served
from mmserve.core.request import Stage
from mmserve.core.tenant import Tenant
from mmserve.schedule.fair import AGING_SECONDS, aged, charged, fair_order, guaranteed
from mmserve.schedule.scheduler import schedule

SHARES = {"a": 1.0, "b": 3.0, "c": 0.5}


def entry(name: str, tenant: str, *, stage: Stage = Stage.QUEUED, share: float = 1.0, **values: int) -> Entry:
    return Entry(name, stage, tenant=tenant, share=share, **values)


def served_one_by_one(entries: list[Entry], costs: dict[str, int], rounds: int) -> list[Entry]:
    """Who is served in each of so many rounds, each of one entry."""
    waiting, served, taken = list(entries), Served(), []
    for _ in range(min(rounds, len(entries))):
        first = waiting[fair_order(waiting, [costs[e.id] for e in waiting], served)[0]]
        served = charged(served, [(first, costs[first.id])])
        waiting.remove(first)
        taken.append(first)
    return taken


@st.composite
def queues(draw: st.DrawFn) -> list[tuple[Entry, int]]:
    """Waiting entries of several tenants, in order of arrival, each with its cost."""
    found = []
    for i in range(draw(st.integers(1, 40))):
        tenant = draw(st.sampled_from(sorted(SHARES)))
        found.append((entry(f"r{i}", tenant, share=SHARES[tenant]), draw(st.integers(1, 20))))
    return found


@given(queues(), st.integers(1, 40))
def test_tenants_that_wait_are_served_by_their_shares(queue: list[tuple[Entry, int]], rounds: int) -> None:
    """Goyal, Vin and Cheng's Theorem 1: at most one largest request of each apart, in work over share."""
    costs = {e.id: cost for e, cost in queue}
    taken = served_one_by_one([e for e, _cost in queue], costs, rounds)
    work: Counter[str] = Counter()
    for one in taken:
        work[one.tenant] += costs[one.id]
    left = {e.tenant for e, _cost in queue if e not in taken}  # these waited all the time
    largest = {t: max((cost for e, cost in queue if e.tenant == t), default=0) / SHARES[t] for t in SHARES}
    for one in left:
        for other in left:
            assert work[one] / SHARES[one] - work[other] / SHARES[other] <= largest[one] + largest[other] + 1e-9


@given(queues())
def test_each_tenant_keeps_its_order_and_everybody_is_served(queue: list[tuple[Entry, int]]) -> None:
    entries = [e for e, _cost in queue]
    taken = served_one_by_one(entries, {e.id: cost for e, cost in queue}, len(entries))
    assert sorted(e.id for e in taken) == sorted(e.id for e in entries)
    for tenant in SHARES:
        assert [e for e in taken if e.tenant == tenant] == [e for e in entries if e.tenant == tenant]


@given(queues())
def test_a_batch_is_the_order_of_serving_one_by_one(queue: list[tuple[Entry, int]]) -> None:
    entries, costs = [e for e, _cost in queue], [cost for _e, cost in queue]
    order = [entries[i] for i in fair_order(entries, costs, Served())]
    assert order == served_one_by_one(entries, {e.id: cost for e, cost in queue}, len(entries))


@given(queues(), st.integers(1, 60))
def test_no_place_is_left_empty(queue: list[tuple[Entry, int]], budget: int) -> None:
    """As many entries as first come, first served would take fit, or the next in order does not."""
    entries = [dataclasses.replace(e, stage=Stage.LOADED, images=cost) for e, cost in queue]
    limits = Budgets(frozenset({"encode"}), 9, 99, 9, encode_batch=budget, prefill_tokens=9, decode_tokens=9)
    plan = schedule(entries, limits)
    taken = [e for e in entries if e.id in plan.encode]
    order = [entries[i] for i in fair_order(entries, [cost for _e, cost in queue], Served())]
    assert plan.encode == tuple(e.id for e in order[: len(taken)])
    room = budget - sum(e.images for e in taken)
    assert len(taken) == 1 or room >= 0
    assert len(taken) == len(order) or order[len(taken)].images > room


@given(queues())
def test_an_only_tenant_is_served_in_the_order_of_arrival(queue: list[tuple[Entry, int]]) -> None:
    for name in ("", "a"):
        entries = [dataclasses.replace(e, tenant=name) for e, _cost in queue]
        assert fair_order(entries, [cost for _e, cost in queue], Served(7.0, {"a": 9.0})) == list(range(len(entries)))


def test_the_first_request_of_another_tenant_waits_for_one_of_two_hundred() -> None:
    flood = [entry(f"a{i}", "a") for i in range(200)]
    taken = served_one_by_one(flood[:50], {e.id: 1 for e in flood}, 10)
    served = Served()
    for one in taken:
        served = charged(served, [(one, 1)])
    waiting = [*flood[10:], entry("b0", "b")]
    order = [waiting[i].id for i in fair_order(waiting, [1] * len(waiting), served)]
    assert order.index("b0") <= 1


def test_what_was_served_while_nobody_else_waited_is_not_held_against_a_tenant() -> None:
    """And who had nothing waiting saved nothing up: from here on both are served in turn."""
    served = Served()
    for i in range(100):
        served = charged(served, [(entry(f"a{i}", "a"), 5)])
    waiting = [entry(f"{t}{i}", t) for i in range(4) for t in "ab"]
    order = [waiting[i].tenant for i in fair_order(waiting, [5] * len(waiting), served)]
    assert order in (list("abababab"), list("babababa"))


def test_lower_classes_are_served_first_and_waiting_raises_a_request() -> None:
    waiting = [dataclasses.replace(entry("batch", "a"), priority=1), entry("live", "b")]
    assert fair_order(waiting, [1, 1], Served()) == [1, 0]
    assert [aged(2, seconds * AGING_SECONDS) for seconds in (0, 0.99, 1, 1.5, 2, 50)] == [2, 2, 1, 1, 0, 0]
    assert aged(0, 1e9) == 0


def test_a_decode_batch_holds_every_tenants_share() -> None:
    ready = [entry(f"a{i}", "a", stage=Stage.READY, rows=10) for i in range(20)]
    ready += [entry(f"b{i}", "b", stage=Stage.READY, rows=10) for i in range(3)]
    limits = Budgets(frozenset({"decode"}), 9, 9, 99, encode_batch=9, prefill_tokens=9, decode_tokens=100)
    plan = schedule(ready, limits)
    assert {"b0", "b1", "b2"} <= set(plan.decode) and len(plan.decode) == 10


def test_a_begun_prefill_goes_on_while_another_tenant_waits_for_the_pages_it_holds() -> None:
    """Else both would wait for ever."""
    begun = entry("long", "a", stage=Stage.ENCODED, tokens=50, pages=5, prefilled=16)
    new = entry("new", "b", stage=Stage.ENCODED, tokens=10, pages=5)
    limits = Budgets(frozenset({"prefill"}), 4, 9, 9, encode_batch=9, prefill_tokens=16, decode_tokens=9)
    ahead = {"prefill": Served(0.0, {"a": 100.0})}
    assert schedule([begun, new], dataclasses.replace(limits, served=ahead)).prefill == ("long",)
    plan = schedule([begun, new], dataclasses.replace(limits, served=ahead, free_pages=5))
    assert plan.prefill == ("new",)
    assert plan.served["prefill"].tenants["a"] == 100.0


def test_nobody_overtakes_another_tenants_request_that_waits_for_pages() -> None:
    big = entry("big", "a", stage=Stage.ENCODED, tokens=10, pages=6)
    small = entry("small", "b", stage=Stage.ENCODED, tokens=1, pages=1)
    limits = Budgets(frozenset({"prefill"}), 5, 9, 9, encode_batch=9, prefill_tokens=99, decode_tokens=9)
    assert schedule([big, small], limits).prefill == ()


@given(st.integers(1, 1000), st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1))
@example(15, {"a": 8.695134226868863})
def test_guaranteed_places_are_the_shares_of_those_who_wait(places: int, shares: dict[str, float]) -> None:
    tenants = [Tenant(name=name, share=share) for name, share in shares.items()]
    owed = [guaranteed(places, tenant, tenants) for tenant in tenants]
    assert all(owed) and sum(owed) <= places + len(tenants)
    assert guaranteed(places, tenants[0], []) == places
