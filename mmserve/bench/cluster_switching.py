"""An encode-heavy load on 1e1p4d, with and without role switching, compared with the simulator's prediction."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from statistics import mean, median

from mmserve.bench.cluster_fleets import SIDE, config, fleet, one_process, request
from mmserve.bench.in_process import ask_all
from mmserve.bench.measures import Figures, Progress, at_least, at_most, stated
from mmserve.config import resolve
from mmserve.plan.layout import Batching, Layout
from mmserve.plan.measure import StageBench, measured
from mmserve.plan.other_load import OtherLoad
from mmserve.plan.served import GOAL, kind_of, predicted
from mmserve.plan.switching import RoleSwitching

_REQUESTS, _IMAGES, _TOKENS = 300, 6, 2
_PATH, _RECOMPUTE, _ROLES, _LAYOUT = "bundled-causal", "last", "e p d d d d", "1e1p4d"
#: Minimum seconds between two role changes; and duration of a measurement of the machine's other load.
_DECIDE, _MEASURE = 1.0, 1.5


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """The makespan of the same load both ways, in turns, and the simulator's from costs measured before and after."""
    asked = [request(f"q{i}", _IMAGES, _TOKENS, _RECOMPUTE, i) for i in range(_REQUESTS)]
    with one_process(_PATH) as engine:
        answers = ask_all(engine, asked)
    right = [answer.text for answer in answers]
    kind = kind_of([answer.whole() for answer in answers], rows=1, images=_IMAGES, side=SIDE, tokens=_TOKENS)
    times: dict[bool, list[float]] = {True: [], False: []}
    beside: dict[bool, list[float]] = {True: [], False: []}
    same = switches = turns = 0
    with closing(StageBench(config(_PATH))) as bench:
        measured(bench, 1, progress)
        for _ in range(max(1, arguments.repeats)):
            for switching in (False, True):
                with fleet(_PATH, _ROLES, switching=switching, decide_seconds=_DECIDE) as (_made, coordinator):
                    ask_all(coordinator, [request("warm", 1, 2, _RECOMPUTE, 9_999)])
                    before = _others()
                    answers = ask_all(coordinator, asked)
                    beside[switching] += [before, _others()]
                    seconds = max(a.ended for a in answers) - min(a.begun for a in answers)
                    switches += coordinator.switches
                times[switching].append(seconds)
                same += sum(a.finished is not None and a.text == text for a, text in zip(answers, right, strict=True))
                turns += 1
                progress(f"{'with' if switching else 'without'} switching: {seconds:.1f} s")
        costs = measured(bench, 1, progress).costs  # for both ways: the speed of a machine varies
    settings = config(_PATH)
    batching, layout = Batching.of(resolve(settings.engine, device="cpu")), Layout.parse(_LAYOUT)
    measures, rows = [], []
    for switching, label in ((False, f"{_LAYOUT} as it is"), (True, f"{_LAYOUT} with switching")):
        rule = RoleSwitching(every=_DECIDE) if switching else None
        cores, loaders = os.cpu_count() or 1, settings.media.decode_workers
        others = mean(beside[switching])
        foreseen = predicted(costs, layout, batching, kind, _REQUESTS, cores, others, loaders, rule).makespan
        took = median(times[switching])
        rows.append({"switching": switching, "seconds": times[switching], "predicted_s": foreseen, "beside": others})
        measures += [
            stated(label, took, "s"),
            stated(f"{label}, predicted", foreseen, "s"),
            at_most(f"{label}, prediction off by", abs(foreseen / took - 1), "of the time", GOAL),
        ]
    measures += [
        at_least("work done sooner by switching", median(times[False]) / median(times[True]), "x", 1.0),
        stated("changes of roles a run", switches / max(1, arguments.repeats), "switches"),
        at_least("same answers", same / (turns * _REQUESTS), "share", 1.0),
    ]
    return {
        "rows": rows,
        "measures": measures,
        "settings": {"requests": _REQUESTS, "images": _IMAGES, "tokens": _TOKENS, "kind": str(kind)},
    }


def _others() -> float:
    """Average number of runnable threads of other processes while this fleet is idle."""
    with OtherLoad() as seen:
        time.sleep(_MEASURE)
    return seen.threads
