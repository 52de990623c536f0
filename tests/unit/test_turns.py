"""Decode steps are shared out by their rows: long steps do not hold up short ones, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.plan import Budgets, Entry
from mmserve.core.request import Stage
from mmserve.schedule.scheduler import schedule
from mmserve.schedule.turns import advanced

#: Layers of a long pass: shorter requests may run between two of them.
LAYERS = 6


@dataclass
class Asking:
    """A request of the simulation: rows and number of its steps, and the pass before which it comes."""

    rows: int
    steps: int
    arrives: int = 0


def limits(**changes: object) -> Budgets:
    base = Budgets(frozenset({"decode"}), 9, 9, 99, encode_batch=9, prefill_tokens=9, decode_tokens=256)
    return dataclasses.replace(base, **changes)


class Decoding:
    """A decode worker that carries out plans; ``ran``: rows of each request, the pass under way included."""

    def __init__(self, asked: list[Asking], budget: int = 256) -> None:
        self.budgets = limits(decode_tokens=budget)
        self.asked = {f"r{i}": each for i, each in enumerate(asked)}
        self.left = {name: each.steps for name, each in self.asked.items()}
        self.table: dict[str, Entry] = {}
        self.ran: Counter[str] = Counter()
        self.passes = 0

    def come(self) -> None:
        """Take in those whose pass it is."""
        for name, each in self.asked.items():
            if name not in self.table and self.left[name] and each.arrives <= self.passes:
                new = Entry(name, Stage.PREFILLED, rows=each.rows, tokens=each.rows, turn=self.budgets.now)
                self.table[name] = new

    def step(self) -> tuple[str, ...]:
        """One pass, and those within it; the requests of the pass itself."""
        self.passes += 1
        return self._run(self.budgets, LAYERS)

    def _run(self, budgets: Budgets, layers: int) -> tuple[str, ...]:
        plan = schedule(list(self.table.values()), budgets)
        self.budgets = dataclasses.replace(self.budgets, now=plan.now)
        for name in plan.decode:
            stage, turn = self.table[name].stage, plan.turns[name]
            self.ran[name] += 0 if stage is Stage.PREFILLED else self.table[name].rows
            self.table[name] = dataclasses.replace(self.table[name], stage=Stage.STEPPING, turn=turn)
        within = plan.within["decode"]
        for _ in range(layers):
            while within > 0:
                nested = dataclasses.replace(self.budgets, idle=frozenset(), within={"decode": within})
                rows = sum(self.asked[name].rows for name in self._run(nested, 0))
                assert rows <= within
                within -= rows
                if not rows:
                    break
        for name in plan.decode:
            self.left[name] -= 1
            self.table[name] = dataclasses.replace(self.table[name], stage=Stage.READY)
            if not self.left[name]:
                del self.table[name]
        return plan.decode


def test_short_requests_end_while_a_long_one_runs_a_single_pass() -> None:
    """Not one pass of 900 rows for each of their steps."""
    work = Decoding([Asking(900, 50), *(Asking(70, 10) for _ in range(4))])
    work.come()
    while any(work.left[f"r{i}"] for i in range(1, 5)):
        work.step()
    assert work.ran["r0"] <= 900
    while work.table:
        work.step()
    assert work.left["r0"] == 0


def test_a_long_request_advances_while_short_ones_never_cease() -> None:
    """As fast as each of those beside it."""
    work = Decoding([Asking(900, 99), *(Asking(64, 6, arrives=i // 3) for i in range(3000))])
    while work.ran["r0"] < 9000:
        work.come()
        work.step()
    others = sum(work.ran.values()) - 9000
    at_once = max(len(work.table), 4)
    assert others <= 9000 * at_once * 2, f"{others} rows of at most {at_once} others at once"


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Asking], int]:
    asked = [
        Asking(draw(st.integers(1, 90)), draw(st.integers(1, 6)), draw(st.integers(0, 12)))
        for _ in range(draw(st.integers(1, 12)))
    ]
    return asked, draw(st.integers(1, 120))


@given(crowds())
def test_everybody_gets_a_turn_within_a_bound(case: tuple[list[Asking], int]) -> None:
    """While a request waits, each other one runs at most its rows, and two of its own steps, and within the passes of
    long ones four times theirs."""
    asked, budget = case
    work = Decoding(asked, budget)
    largest, since = max(each.rows for each in asked), dict[str, int]()
    while work.table or any(work.left.values()):
        work.come()
        total = sum(work.ran.values())
        for name, entry in work.table.items():
            waited = total - since.setdefault(name, total)
            assert waited <= (len(asked) * (entry.rows + 3 * largest)) * 5, name
        waiting = set(work.table)
        for name in work.step():
            since.pop(name, None)
        for name in waiting & work.table.keys():
            if work.table[name].turn > work.budgets.now:
                since.pop(name, None)  # it has had a turn within another's pass


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 90)), min_size=1, max_size=8), st.integers(0, 40))
def test_the_clock_never_goes_back_and_steps_are_charged(batch: list[tuple[float, int]], now: int) -> None:
    taken = [(Entry(f"r{i}", Stage.READY, turn=turn, rows=rows), rows) for i, (turn, rows) in enumerate(batch)]
    clock, due = advanced(now, taken, len(taken))
    assert clock >= now
    for entry, rows in taken:
        assert due[entry.id] >= max(now, entry.turn) + rows
    assert max(due.values()) <= max(now, *(turn for turn, _rows in batch)) + max(rows for _turn, rows in batch)


def test_what_ran_alone_is_not_held_against_anybody() -> None:
    """A request of many rows that ran beside one of few, and had room, does not wait for it once others come."""
    work = Decoding([Asking(20, 999), Asking(200, 999), *(Asking(20, 9, arrives=50) for _ in range(20))])
    for _ in range(50):
        work.come()
        work.step()
    assert work.ran["r1"] == 200 * 49
    turns = [i for i in range(60) if work.come() or "r1" in work.step()]  # type: ignore[func-returns-value]
    assert turns[0] <= 20


def test_a_long_pass_lets_shorter_requests_run_and_no_other_long_one() -> None:
    entries = [
        Entry("long", Stage.STEPPING, rows=900, turn=900.0),
        Entry("other", Stage.READY, rows=600),
        Entry("short", Stage.READY, rows=200),
        Entry("shorter", Stage.READY, rows=30),
        Entry("new", Stage.ENCODED, tokens=90),
        Entry("newer", Stage.ENCODED, tokens=100),
    ]
    begun = dataclasses.replace(entries[0], stage=Stage.READY, turn=-1.0)
    assert schedule([begun, *entries[1:]], limits()).within["decode"] == 3600
    assert schedule(entries[2:], limits()).within["decode"] == 0
    within = {"decode": 3600, "prefill": 95}
    plan = schedule(entries, limits(idle=frozenset(), within=within, prefill_tokens=300, free_pages=99))
    assert plan.decode == ("short", "shorter") and plan.within["decode"] == 3600 - 230
    assert plan.prefill == ("new",) and plan.within["prefill"] == 5
    assert schedule(entries, limits(idle=frozenset(), within={"decode": 100})).decode == ("shorter",)
    assert schedule(entries, limits(idle=frozenset())).decode == ()
