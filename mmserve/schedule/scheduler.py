"""The scheduler: a pure function from the requests' states and the budgets to a plan.

Earliest deadline first at every stage before decode (``deadlines.py``), within the stage's budget, and fair between
tenants (``fair.py``). A partial prefill continues before a tenant's new ones, and running decodes do not wait for
prefills: each has its own budget. A batch always contains at least its first request, so no request is too large to
run. A next-token model's prompt longer than the budget is prefilled in chunks, with decode steps in between; if its
clip is still being read, the prompt waits until the rows of a whole chunk are available. Decode steps are distributed
fairly by their rows (``turns.py``). A request whose pass has more rows than the budget runs alone, and a bounded number
of rows of shorter ones runs between its layers. A constrained request is encoded once its grammar is compiled, without
delaying later requests; requests with media are encoded once these are read, and do not delay tokenization of requests
without media.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.core.plan import Budgets, Entry, Plan, Served
from mmserve.core.request import Stage
from mmserve.schedule.fair import charged, fair_order
from mmserve.schedule.turns import advanced, rows_within

_DECODES = (Stage.PREFILLED, Stage.STEPPING, Stage.READY)
_HOLDS_PAGES = frozenset({Stage.PREFILLING, *_DECODES})
#: Requests for a stage's next batch, in order, each with its cost in that stage.
_Taken = list[tuple[Entry, int]]


def schedule(entries: Sequence[Entry], budgets: Budgets) -> Plan:
    """The next batch of each idle stage, given all live requests in order of arrival."""
    stages = {
        "constrain": _constrain,
        "load": _load,
        "tokenize": _tokenize,
        "encode": _encode,
        "prefill": _prefill,
        "decode": _decode,
    }
    free = budgets.idle | budgets.within.keys()
    taken = {name: plan(entries, budgets) if name in free else [] for name, plan in stages.items()}
    live = sum(1 / entry.pace for entry in entries if entry.stage in _DECODES)
    now, turns = advanced(budgets.now, taken["decode"], live)
    return Plan(
        **{name: tuple(entry.id for entry, _cost in each) for name, each in taken.items()},
        served={name: charged(budgets.served.get(name, Served()), each) for name, each in taken.items()},
        within={name: _left_within(name, taken[name], budgets) for name in ("prefill", "decode")},
        turns=turns,
        now=now,
    )


def _constrain(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    """Requests are started in order and run concurrently; a slow constraint may be overtaken."""
    room = budgets.max_pending_per_stage - _count(entries, Stage.CONSTRAINING, Stage.CONSTRAINED)
    waiting = [(e, 1) for e in entries if e.stage is Stage.QUEUED and e.constrained]
    return _ordered(waiting, budgets, "constrain")[: min(budgets.constrain, max(0, room))]


def _load(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    """Requests are started in order and read concurrently; slow media may be overtaken."""
    room = budgets.max_pending_per_stage - _count(entries, Stage.LOADING, Stage.LOADED)
    waiting = [(e, e.images) for e in entries if e.images and _startable(e)]
    return _ordered(waiting, budgets, "load")[: min(budgets.load, max(0, room))]


def _tokenize(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    tokenizing = sum(e.stage is Stage.ENCODING and not e.images for e in entries)
    room = budgets.max_pending_per_stage - tokenizing - _waiting_for_prefill(entries)
    queued = [(e, 1) for e in entries if not e.images and _startable(e)]
    return _fill(_ordered(queued, budgets, "tokenize")[: max(0, room)], budgets.encode_batch)


def _encode(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    encoding = sum(e.stage is Stage.ENCODING and e.images > 0 for e in entries)
    room = budgets.max_pending_per_stage - encoding - _waiting_for_prefill(entries)
    loaded = [(e, e.images) for e in entries if e.stage is Stage.LOADED]
    return _fill(_ordered(loaded, budgets, "encode")[: max(0, room)], budgets.encode_batch)


def _startable(entry: Entry) -> bool:
    """Whether a request has no prerequisite left before its media and text are processed."""
    return entry.stage is Stage.CONSTRAINED or (entry.stage is Stage.QUEUED and not entry.constrained)


def _prefill(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    places = max(0, budgets.max_pending_per_stage - _count(entries, Stage.PREFILLING, Stage.PREFILLED))
    encoded = [e for e in entries if e.stage is Stage.ENCODED]
    begun = [e for e in encoded if e.prefilled is not None]  # these hold pages already
    running, pages = budgets.max_running - _count(entries, *_HOLDS_PAGES) - len(begun), budgets.free_pages
    new = [e for e in encoded if e.prefilled is None]
    waiting: _Taken = []
    ready = [(e, e.prefill_rows) for e in _by_due(begun) + _by_due(new) if not e.awaits]
    for entry, cost in _served(ready, budgets, "prefill"):
        if entry.prefilled is None:
            if not running > 0 or entry.pages > pages:
                running = 0  # a request that does not fit is not overtaken, to prevent starvation
                continue
            running, pages = running - 1, pages - entry.pages
        waiting.append((entry, cost))
    taken = _pass(waiting[:places], budgets, "prefill", budgets.prefill_tokens)
    return [(entry, min(cost, budgets.prefill_tokens)) for entry, cost in taken] if budgets.chunked else taken


def _decode(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    """A first step runs no rows if prefill has computed its candidates: it is added to any batch. It is charged for,
    and counted within a long pass, as a whole step of its request."""
    ready = sorted((e for e in entries if e.stage in (Stage.PREFILLED, Stage.READY)), key=lambda e: e.turn)
    waiting = _served([(e, e.rows or e.tokens) for e in ready], budgets, "decode")
    if "decode" not in budgets.idle:
        return _pass(waiting, budgets, "decode", budgets.decode_tokens)
    free = [each for each in waiting if not each[0].rows]
    return free + _fill([each for each in waiting if each[0].rows], budgets.decode_tokens)


def _pass(waiting: _Taken, budgets: Budgets, stage: str, most: int) -> _Taken:
    """Requests for a pass of ``most`` rows; during a long pass, only those within its remaining allowance."""
    if stage in budgets.idle:
        return _fill(waiting, most)
    most = min(most, budgets.within[stage])
    return _fill([(entry, rows) for entry, rows in waiting if rows <= most], most)


def _left_within(stage: str, taken: _Taken, budgets: Budgets) -> int:
    """Number of rows that shorter requests may run during the stage's pass, after the planned ones (``taken``)."""
    if stage == "decode" and stage in budgets.idle:
        return rows_within(sum(entry.rows for entry, _cost in taken), budgets.decode_tokens)
    rows = sum(cost for _entry, cost in taken)
    return rows_within(rows, budgets.prefill_tokens) if stage in budgets.idle else budgets.within.get(stage, 0) - rows


def _ordered(waiting: _Taken, budgets: Budgets, stage: str) -> _Taken:
    """``waiting`` in serving order: by due time, and fairly between tenants."""
    return _served(sorted(waiting, key=lambda each: _sort_key(each[0])), budgets, stage)


def _by_due(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=_sort_key)


def _sort_key(entry: Entry) -> tuple[int, float]:
    """Sort key within a tenant: lower classes first, within a class by due time, else by arrival."""
    return entry.priority, entry.due


def _served(waiting: _Taken, budgets: Budgets, stage: str) -> _Taken:
    """``waiting``, in which each tenant's entries are ordered, in serving order of the tenants."""
    entries, costs = [e for e, _cost in waiting], [cost for _e, cost in waiting]
    return [waiting[i] for i in fair_order(entries, costs, budgets.served.get(stage, Served()))]


def _waiting_for_prefill(entries: Sequence[Entry]) -> int:
    """Number of requests with complete prompts: others wait for their clips."""
    return sum(e.stage is Stage.ENCODED and not e.awaits for e in entries)


def _count(entries: Sequence[Entry], *stages: Stage) -> int:
    return sum(e.stage in stages for e in entries)


def _fill(waiting: _Taken, budget: int) -> _Taken:
    """The longest prefix whose costs fit the budget, at least one entry."""
    left = budget
    for taken, (_entry, cost) in enumerate(waiting):
        left -= cost
        if left < 0:
            return waiting[: max(1, taken)]
    return waiting
