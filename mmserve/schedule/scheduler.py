"""The scheduler: a pure function from the requests' states and the budgets to a plan.

Earliest deadline first at every stage before decode (``deadlines.py``), each bounded by its budget, and fair between
tenants (``fair.py``). A prefill that is begun goes before a tenant's new ones, and running decodes do not wait for
prefills: each pass of either has its own budget. A batch always takes at least its first request, so nothing can be too
large to run. Of a next-token model's prompt that is longer than the budget a batch takes a chunk, and decode has its
turn between two; one whose clip is still read waits until the rows of a whole chunk are there. Decode steps are shared
out fairly by their rows (``turns.py``). A request whose pass has more rows than the budget runs alone, and shorter ones
run between its layers, a number of rows in all. A constrained request is encoded once its grammar is there; those after
it do not wait for that. Nor does text wait for media: a request with media is encoded once these are read, one without
is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.core.plan import Budgets, Entry, Plan, Served
from mmserve.core.request import Stage
from mmserve.schedule.fair import charged, fair_order
from mmserve.schedule.turns import advanced, rows_within

_DECODES = (Stage.PREFILLED, Stage.STEPPING, Stage.READY)
_HOLDS_PAGES = frozenset({Stage.PREFILLING, *_DECODES})
#: Requests that a stage takes now, in order, each with its cost in that stage.
_Taken = list[tuple[Entry, int]]


def schedule(entries: Sequence[Entry], budgets: Budgets) -> Plan:
    """What each idle stage does next, given all live requests in order of arrival."""
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
    """Those that go side by side begin in order; one whose constraint is slow may be overtaken."""
    room = budgets.max_pending_per_stage - _count(entries, Stage.CONSTRAINING, Stage.CONSTRAINED)
    waiting = [(e, 1) for e in entries if e.stage is Stage.QUEUED and e.constrained]
    return _ordered(waiting, budgets, "constrain")[: min(budgets.constrain, max(0, room))]


def _load(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    """Those that are read side by side begin in order; one whose media are slow may be overtaken."""
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
    """Whether nothing is left that comes before a request's media and text."""
    return entry.stage is Stage.CONSTRAINED or (entry.stage is Stage.QUEUED and not entry.constrained)


def _prefill(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    places = max(0, budgets.max_pending_per_stage - _count(entries, Stage.PREFILLING, Stage.PREFILLED))
    encoded = [e for e in entries if e.stage is Stage.ENCODED]
    begun = [e for e in encoded if e.prefilled is not None]  # these hold their pages already
    running, pages = budgets.max_running - _count(entries, *_HOLDS_PAGES) - len(begun), budgets.free_pages
    new = [e for e in encoded if e.prefilled is None]
    waiting: _Taken = []
    ready = [(e, e.prefill_rows) for e in _by_due(begun) + _by_due(new) if not e.awaits]
    for entry, cost in _served(ready, budgets, "prefill"):
        if entry.prefilled is None:
            if not running > 0 or entry.pages > pages:
                running = 0  # no request overtakes the first that does not fit: it would wait for ever
                continue
            running, pages = running - 1, pages - entry.pages
        waiting.append((entry, cost))
    taken = _pass(waiting[:places], budgets, "prefill", budgets.prefill_tokens)
    return [(entry, min(cost, budgets.prefill_tokens)) for entry, cost in taken] if budgets.chunked else taken


def _decode(entries: Sequence[Entry], budgets: Budgets) -> _Taken:
    """A first step runs no rows where prefill has made its candidates: it is done beside any batch. It is charged for,
    and counted within a long pass, as all of its request."""
    ready = sorted((e for e in entries if e.stage in (Stage.PREFILLED, Stage.READY)), key=lambda e: e.turn)
    waiting = _served([(e, e.rows or e.tokens) for e in ready], budgets, "decode")
    if "decode" not in budgets.idle:
        return _pass(waiting, budgets, "decode", budgets.decode_tokens)
    free = [each for each in waiting if not each[0].rows]
    return free + _fill([each for each in waiting if each[0].rows], budgets.decode_tokens)


def _pass(waiting: _Taken, budgets: Budgets, stage: str, most: int) -> _Taken:
    """What a pass of ``most`` rows takes; during a long pass, of those that fit into what is allowed then."""
    if stage in budgets.idle:
        return _fill(waiting, most)
    most = min(most, budgets.within[stage])
    return _fill([(entry, rows) for entry, rows in waiting if rows <= most], most)


def _left_within(stage: str, taken: _Taken, budgets: Budgets) -> int:
    """How many rows shorter requests may run during the stage's pass, once it has ``taken`` what is planned."""
    if stage == "decode" and stage in budgets.idle:
        return rows_within(sum(entry.rows for entry, _cost in taken), budgets.decode_tokens)
    rows = sum(cost for _entry, cost in taken)
    return rows_within(rows, budgets.prefill_tokens) if stage in budgets.idle else budgets.within.get(stage, 0) - rows


def _ordered(waiting: _Taken, budgets: Budgets, stage: str) -> _Taken:
    """``waiting`` in the order in which it is to be served: by when each is due, and fairly between tenants."""
    return _served(sorted(waiting, key=lambda each: _urgency(each[0])), budgets, stage)


def _by_due(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=_urgency)


def _urgency(entry: Entry) -> tuple[int, float]:
    """Within a tenant, lower classes go first, and within a class what is due first; else what arrived first."""
    return entry.priority, entry.due


def _served(waiting: _Taken, budgets: Budgets, stage: str) -> _Taken:
    """``waiting``, of which each tenant's own are in order, in the order in which its tenants are to be served."""
    entries, costs = [e for e, _cost in waiting], [cost for _e, cost in waiting]
    return [waiting[i] for i in fair_order(entries, costs, budgets.served.get(stage, Served()))]


def _waiting_for_prefill(entries: Sequence[Entry]) -> int:
    """Those whose prompts are whole: others wait for their clips."""
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
