"""The simulator of a cluster: nothing is lost, no worker idles before work, and queueing theory holds."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.errors import ConfigError
from mmserve.plan.clock import Clock
from mmserve.plan.costs import Costs, Curve, Link
from mmserve.plan.layout import Batching, Layout, layouts
from mmserve.plan.outcome import Outcome, Served
from mmserve.plan.simulate import Simulation
from mmserve.plan.switching import RoleSwitching
from mmserve.plan.workload import Ask, Kind, Workload

COSTS = Costs(
    "test",
    "made up",
    encode=Curve(0.01, 5e-5),
    prefill=Curve(0.005, 1e-4, 1e-9),
    decode=Curve(0.01, 1e-7, 1e-4),
    load=Curve(0.002, 0.01),
    link=Link(0.001, 1e9),
    embedding_bytes=8000,
    kv_bytes=50_000,
)
IMAGES = Kind(images=2, patches=1000, megapixels=1.0, visual_tokens=100, output_tokens=8)
TEXT = Kind(weight=2.0, text_tokens=300, output_tokens=20)
MIXED = Workload("mixed", (IMAGES, TEXT, Kind(images=5, patches=300, visual_tokens=30, output_tokens=1)))
#: Layouts with more than one way through them, too.
LAYOUTS = ("1e1p1d", "3e2p3d", "1epd", "4epd", "2ep1d", "1e2pd", "1e2ep1d", "1e1p1d1epd", "1e1p4d", "3e3p2d")


def simulated(
    layout: str, workload: Workload = MIXED, rate: float = 2.0, count: int = 60, seed: int = 1, **options: object
) -> Outcome:
    batching = options.pop("batching", Batching())
    costs = options.pop("costs", COSTS)
    asks = workload.draw(count, rate, seed)
    return Simulation(costs, Layout.parse(layout), batching, asks, **options).run()  # type: ignore[arg-type]


def test_percentiles_are_those_of_benchmarks() -> None:
    outcome = Outcome([Served(Ask(number, 0.0, TEXT), float(number), 99.0) for number in range(1, 11)], 99.0)
    assert [outcome.percentile("ttft", share) for share in (0.5, 0.9, 0.91, 1.0)] == [5.0, 9.0, 10.0, 10.0]


@settings(max_examples=30, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    rate=st.sampled_from([0.5, 5.0, 50.0, math.inf]),
    seed=st.integers(0, 99),
    encode_batch=st.integers(1, 8),
    prefill_tokens=st.sampled_from([1, 128, 2048]),
    decode_tokens=st.integers(1, 8),
    max_running=st.integers(1, 4),
    max_pending=st.integers(1, 3),
    shards=st.integers(1, 4),
    chunked=st.booleans(),
    first=st.sampled_from(["prefill", "decode"]),
    cores=st.sampled_from([None, 1, 2]),
    loaders=st.integers(0, 2),
    switching=st.booleans(),
)
def test_every_request_ends_once_after_its_stages(
    layout: str,
    rate: float,
    seed: int,
    encode_batch: int,
    prefill_tokens: int,
    decode_tokens: int,
    max_running: int,
    max_pending: int,
    shards: int,
    chunked: bool,
    first: str,
    cores: int | None,
    loaders: int,
    switching: bool,
) -> None:
    batching = Batching(
        encode_batch=encode_batch,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        max_running=max_running,
        max_pending=max_pending,
        shards=shards,
    )
    costs = replace(COSTS, chunked=chunked, first_token=first)
    rule = RoleSwitching(every=1.0) if switching else None

    def audit(simulation: Simulation) -> None:
        for worker in simulation.workers:
            assert worker.live >= 0 and worker.coming >= 0 and worker.encoded >= 0
            assert len(worker.running) <= worker.live
        assert simulation.queues.encoded >= 0 and simulation.queues.undecoded >= 0
        assert len(simulation.live) + len(simulation.served) <= 40

    options = {"cores": cores, "loaders": loaders, "switching": rule, "audit": audit}
    outcome = simulated(layout, rate=rate, count=40, seed=seed, batching=batching, costs=costs, **options)
    assert [one.ask.number for one in outcome.served] == list(range(40))
    for one in outcome.served:
        kind = one.ask.kind
        least = costs.prefill_seconds([(0, kind.prompt)]) - costs.prefill.a
        assert one.ttft >= least - 1e-9
        assert one.end - one.first >= kind.passes * costs.decode.b - 1e-9
        assert one.end >= one.first


@settings(max_examples=20, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), rate=st.sampled_from([1.0, 8.0, math.inf]), seed=st.integers(0, 99))
def test_no_worker_is_idle_before_work_that_it_may_do(layout: str, rate: float, seed: int) -> None:
    free = Batching(max_running=1000, max_pending=1000)

    def audit(simulation: Simulation) -> None:
        for worker in simulation.workers:
            if worker.idle:
                assert not simulation.queues.any_for(worker)

    simulated(layout, rate=rate, seed=seed, batching=free, audit=audit)


@settings(max_examples=12, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 99))
def test_all_that_is_free_or_waits_leaves_nothing_behind(layout: str, seed: int) -> None:
    asks = MIXED.draw(30, 5.0, seed)
    simulation = Simulation(COSTS, Layout.parse(layout), Batching(max_running=3, max_pending=2), asks)
    simulation.run()
    q = simulation.queues
    assert not simulation.live and not q.parts and not q.prefills and q.encoded == q.undecoded == 0
    for w in simulation.workers:
        assert w.live == w.coming == w.encoded == 0 and not w.running and not w.waiting and not w.prefills


def test_the_same_seed_gives_the_same_run() -> None:
    one, two = (simulated("3e2p3d", rate=10.0, batching=Batching(shards=2)) for _ in range(2))
    assert one == two
    assert one != simulated("3e2p3d", rate=10.0, seed=2, batching=Batching(shards=2))


@settings(max_examples=12, deadline=None)
@given(
    layout=st.sampled_from(["1e1p1d", "2e1p2d", "2epd", "2ep1d", "1e2pd"]),
    more=st.sampled_from(["e", "p", "d"]),
    seed=st.integers(0, 20),
)
def test_more_workers_never_take_much_longer(layout: str, more: str, seed: int) -> None:
    counts = dict(Layout.parse(layout).counts)
    role = next(role for role in counts if more in role)
    grown = Layout(tuple((r, n + (r == role)) for r, n in counts.items()))
    before = simulated(layout, rate=math.inf, seed=seed).makespan
    after = simulated(str(grown), rate=math.inf, seed=seed).makespan
    assert after <= 1.1 * before  # batches that are smaller now may cost a little


@pytest.mark.parametrize("layout", ["1e1p1d", "2epd", "3e1p2d"])
def test_littles_law(layout: str) -> None:
    """Requests in the system on average = arrival rate × time in it, counted in two independent ways."""
    seen: list[tuple[float, int]] = []

    def audit(simulation: Simulation) -> None:
        seen.append((simulation.clock.now, len(simulation.live)))

    outcome = simulated(layout, rate=3.0, count=600, audit=audit)
    area = sum((b[0] - a[0]) * a[1] for a, b in pairwise(seen))
    inside = area / outcome.makespan
    rate = len(outcome.served) / outcome.makespan
    assert inside == pytest.approx(
        rate * statistics.mean(one.end - one.ask.arrival for one in outcome.served), rel=1e-6
    )


def test_a_queue_of_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: one worker that only prefills, a request at a time; mean wait = ρ·s / 2(1 − ρ)."""
    kind = Kind(text_tokens=1000, output_tokens=1)
    costs = Costs("md1", "", encode=Curve(), prefill=Curve(b=1e-4), decode=Curve(), first_token="prefill")
    service, rate = 0.1, 7.0
    waits = []
    for seed in range(5):
        outcome = simulated(
            "1p1d", Workload("w", (kind,)), rate, 10_000, seed, batching=Batching(prefill_tokens=1), costs=costs
        )
        waits.append(statistics.mean(one.ttft for one in outcome.served) - service)
    busy = rate * service
    assert statistics.mean(waits) == pytest.approx(busy * service / (2 * (1 - busy)), rel=0.05)


def test_times_of_one_request_alone_are_the_sum_of_its_stages() -> None:
    outcome = simulated("1e1p1d", Workload("one", (IMAGES,)), count=1)
    [one] = outcome.served
    encode = COSTS.load(2.0) + COSTS.encode_seconds([1000, 1000])
    sent = COSTS.link.latency + 200 * 8000 / 1e9
    prefill = COSTS.prefill_seconds([(0, 232)])
    moved = COSTS.link.latency + 232 * 50_000 / 1e9
    assert one.ttft == pytest.approx(encode + sent + prefill + moved)
    steps = sum(COSTS.decode_seconds(232 + done, 1) for done in range(7))
    assert one.end - one.first == pytest.approx(steps)


def test_a_hand_over_within_a_host_is_work_for_its_cores() -> None:
    """Alone it takes its own time, in place of the link's; many at once share the cores with all passes."""
    costs = replace(COSTS, handover=Curve(0.01, 1e-9))
    [one] = simulated("1e1p1d", Workload("one", (IMAGES,)), count=1, costs=costs, cores=2).served
    encode = COSTS.load(2.0) + COSTS.encode_seconds([1000, 1000])
    sent, moved = (0.01 + size * 1e-9 for size in (200 * 8000, 232 * 50_000))
    assert one.ttft == pytest.approx(encode + sent + COSTS.prefill_seconds([(0, 232)]) + moved)
    [apart] = simulated("1e1p1d", Workload("one", (IMAGES,)), count=1, costs=costs).served
    [before] = simulated("1e1p1d", Workload("one", (IMAGES,)), count=1).served
    assert apart.ttft == before.ttft, "between hosts the link counts"
    heavy = replace(COSTS, handover=Curve(0.5), link=Link())
    free = replace(COSTS, link=Link())
    busy, idle = (
        simulated("1e1p4d", Workload("one", (IMAGES,)), math.inf, 40, costs=each, cores=1).makespan
        for each in (heavy, free)
    )
    assert busy - idle == pytest.approx(40 * 2 * 0.5, rel=0.1), "one core has it all to do"


def test_images_over_two_workers_take_half_the_time() -> None:
    one = Workload("one", (IMAGES,))
    whole = simulated("2e1p1d", one, count=1).served[0].ttft
    shared = simulated("2e1p1d", one, count=1, batching=Batching(shards=2)).served[0].ttft
    less = COSTS.load(2.0) + COSTS.encode_seconds([1000] * 2) - COSTS.load(1.0) - COSTS.encode_seconds([1000])
    assert whole - shared == pytest.approx(less + 100 * 8000 / 1e9)


def test_passes_on_one_host_share_its_cores() -> None:
    ended: list[float] = []
    clock = Clock(cores=2)
    for seconds in (1.0, 2.0, 3.0):
        clock.run(seconds, lambda: ended.append(clock.now))
    while clock.step():
        pass
    # three share two cores until each has 1 s of work done, then there is a core for each
    assert ended == pytest.approx([1.5, 2.5, 3.5])
    ended.clear()
    clock = Clock(cores=2, background=3.0)
    clock.run(1.0, lambda: ended.append(clock.now))
    while clock.step():
        pass
    assert ended == pytest.approx([2.0])  # one of four has half a core


@pytest.mark.parametrize(
    ("cores", "background", "passes", "each"),
    [
        (2, 0.0, 1, 1.0),  # nothing else runs
        (2, 0.0, 2, 1.4),
        (2, 0.0, 4, 2.8),  # and half a core each
        (2, 1.0, 1, 1.4),
        (3, 0.0, 2, 1.2),  # one of two further cores is busy
        (1, 0.0, 2, 2.0),  # one core has no neighbours
        (None, 0.0, 5, 1.0),
    ],
)
def test_passes_take_longer_the_more_cores_are_busy(
    cores: int | None, background: float, passes: int, each: float
) -> None:
    ended: list[float] = []
    clock = Clock(cores, background, interference=1.4)
    for _ in range(passes):
        clock.run(1.0, lambda: ended.append(clock.now))
    while clock.step():
        pass
    assert ended == pytest.approx([each] * passes)


def test_a_simulation_is_as_crowded_as_its_costs_say() -> None:
    crowded = replace(COSTS, interference=1.5, link=Link())
    alone, shared = (
        simulated("2e1p1d", Workload("one", (IMAGES,)), math.inf, 30, costs=costs, cores=2).makespan
        for costs in (replace(crowded, interference=1.0), crowded)
    )
    assert 1.3 * alone < shared < 1.5 * alone


def test_roles_switch_to_where_work_waits_and_that_is_sooner() -> None:
    heavy = Workload("heavy", (replace(IMAGES, patches=20_000),))
    stays = simulated("1e1p4d", heavy, math.inf, 40)
    switches = simulated("1e1p4d", heavy, math.inf, 40, switching=RoleSwitching(every=2.0))
    assert {move for _at, move in switches.switches} == {"d>e"}
    assert 0 < len(switches.switches) <= 3  # one decodes to the end
    assert switches.makespan < 0.6 * stays.makespan


def test_a_worker_that_switches_hands_over_what_it_decodes() -> None:
    """Long answers are under way everywhere when the images come."""
    long = Kind(text_tokens=50, output_tokens=400)
    heavy = Kind(images=2, patches=20_000, visual_tokens=20, output_tokens=2, weight=3)
    both = Workload("both", (long, heavy))
    outcome = simulated("1e1p3d", both, 20.0, 60, switching=RoleSwitching(every=1.0))
    assert outcome.switches and len(outcome.served) == 60


def test_a_layout_that_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="no worker encodes"):
        simulated("2p1d", Workload("w", (IMAGES,)))
    for text, why in (("", "counts and roles"), ("3x", "counts"), ("1e1p", "decodes"), ("1ed1p1d", "role is one of")):
        with pytest.raises(ConfigError, match=why):
            Layout.parse(text)


def test_layouts_are_all_of_a_size_and_none_twice() -> None:
    found = [str(layout) for layout in layouts(5, images=True)]
    assert len(found) == len(set(found)) == 6 + 4 + 4 + 1
    assert all(Layout.parse(text).workers == 5 and str(Layout.parse(text)) == text for text in found)
    assert {str(layout) for layout in layouts(3, images=False)} == {"1p2d", "2p1d", "3pd"}
