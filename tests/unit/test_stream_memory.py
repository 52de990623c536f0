"""Memory policies of streams as pure functions, within their bounds; positions; what is kept on the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import streaming_model

from mmserve.core.session import Memory
from mmserve.encode.visual import VISUAL
from mmserve.errors import InvalidArgument
from mmserve.models.base import Attention
from mmserve.video.archive import Archive, evenly, inside
from mmserve.video.base import EncodedFrame, Scope
from mmserve.video.layout import FrameRows
from mmserve.video.memory import POLICIES, Kind, MemoryPolicy, Rows, policy_of
from mmserve.video.memory.carrier import merged
from mmserve.video.memory.similarity import Similarity
from mmserve.video.positions import after_eviction, is_full, laid_out
from mmserve.video.rows import Unit, sinks
from mmserve.video.state import Streaming, StreamState

SINKS = 4


def rows_of(sizes: list[int], carriers: int, seed: int = 0) -> Rows:
    """Rows of sinks, carriers and frames: of each, one label and as many visual rows as ``sizes`` says."""
    kind = [Kind.SINK] * SINKS + [Kind.CARRIER] * carriers
    frame = [-1] * SINKS + list(range(carriers))
    for number, size in enumerate(sizes, carriers):
        kind += [Kind.LABEL] + [Kind.VISUAL] * size
        frame += [number] * (size + 1)
    rng = np.random.default_rng(seed)
    n = len(kind)
    norms, features = rng.random(n).astype(np.float32), rng.standard_normal((n, 3)).astype(np.float32)
    return Rows(np.array(kind, np.int8), np.array(frame, np.int64), norms, features)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    carriers=st.integers(0, 12),
    share=st.floats(0, 1),
    bound=st.integers(0, 20),
)
def test_a_policy_keeps_its_bound_the_sinks_and_the_newest(
    name: str, sizes: list[int], carriers: int, share: float, bound: int
) -> None:
    rows = rows_of(sizes, carriers if name == "carrier" else 0)
    most = SINKS + int(share * (len(rows) - SINKS - 1))
    left = policy_of(Memory(policy=name, carriers=bound)).retain(rows, most)
    assert len(left) <= most
    assert (np.diff(left.keep) > 0).all()
    assert left.keep[:SINKS].tolist() == list(range(SINKS))
    gone = np.setdiff1d(rows.frames, rows.frame[left.keep])
    kept = np.setdiff1d(rows.frames, gone)
    whole = [f for f in kept if np.isin(np.flatnonzero(rows.frame == f), left.keep).all()]
    if name != "group":  # which leaves rows of a frame, or none
        assert whole == list(kept), "frames go as a whole"
        assert not len(kept) or not len(gone) or gone.max() < kept.min(), "older frames go first"
    assert set(left.pooled) <= set(gone)
    if name == "carrier":
        count = np.count_nonzero(rows.kind[left.keep] == Kind.CARRIER) + len(left.pooled)
        assert count <= bound
    else:
        assert len(left.pooled) == 0


def test_frames_go_in_chunks_but_never_more_than_half_where_few_would_do() -> None:
    policy = policy_of(Memory())
    rows = rows_of([9] * 20, 0)
    assert len(np.unique(rows.frame[policy.retain(rows, len(rows) - 1).keep])) - 1 == 12
    few = rows_of([9] * 4, 0)
    assert len(np.unique(few.frame[policy.retain(few, len(few) - 1).keep])) - 1 == 2


def test_of_similar_neighbours_the_earlier_carrier_goes() -> None:
    tokens = np.array([[1, 0], [0, 1], [0.1, 1], [1, 0.2]], np.float32)
    assert merged(tokens, 3).tolist() == [True, False, True, True]
    assert merged(tokens, 1).sum() == 1
    assert not merged(tokens, 0).any()


def test_rows_that_changed_little_are_dropped_until_the_next_whole_frame() -> None:
    policy, before = Similarity(every=4), np.eye(4, dtype=np.float32)
    after = before.copy()
    after[2] = [1, 0, 0, 0]
    assert policy.taken(before, after, 1).tolist() == [False, False, True, False]
    assert policy.taken(before, before, 2).sum() == 1, "a frame leaves something"
    assert policy.taken(before, after, 4).all()
    assert policy.taken(None, after, 5).all()
    rows = rows_of([3] * 12, 0)
    left = policy.retain(rows, len(rows) - 18)
    assert min(f for f in rows.frame[left.keep] if f >= 0) == 8, "what is left begins with a whole frame"


def test_a_group_keeps_the_rows_with_the_smallest_keys() -> None:
    rows = rows_of([4] * 24, 0)
    assert rows.norms is not None
    left = policy_of(Memory(policy="group")).retain(rows, len(rows) - 1)
    old = np.flatnonzero((rows.frame >= 0) & (rows.frame < 8) & (rows.kind == Kind.VISUAL))
    stay = np.intersect1d(old, left.keep)
    assert len(stay) == 8
    assert rows.norms[stay].max() <= rows.norms[np.setdiff1d(old, stay)].min()
    assert np.isin(np.flatnonzero(rows.frame >= 8), left.keep).all()


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"memory\.policy"):
        policy_of(Memory(policy="all"))
    assert all(isinstance(policy_of(Memory(policy=name)).needs, frozenset) for name in POLICIES)


def test_positions_after_an_eviction() -> None:
    places = np.array([0, 1, 2, 3, 20, 21, 22])
    assert after_eviction("renumber", places, np.arange(7), 4).tolist() == list(range(7))
    assert after_eviction("gaps", places, np.arange(7), 4).tolist() == places.tolist()
    assert is_full(places, 10, 32)
    assert not is_full(places, 9, 32)


@settings(max_examples=50)
@given(
    units=st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5)), max_size=6),
    header=st.integers(1, 4),
    axes=st.sampled_from([0, 3]),
)
def test_rows_placed_one_after_another_are_those_laid_out_at_once(
    units: list[tuple[bool, int, int, int]], header: int, axes: int
) -> None:
    """Units of visual tokens, some with text in front, side by side in time, by rows and by columns."""
    table, time = sinks(np.arange(header), axes or 1), 0
    for number, (text, rows, columns, step) in enumerate(units):
        time += step
        own = np.array([[time, r, c] for r in range(rows) for c in range(columns)]).T
        ids = np.concatenate([np.full(2 * text, 7), np.full(own.shape[1], VISUAL)])
        coordinates = np.concatenate([np.zeros((3, 2 * text), np.int64), own], axis=1)[:axes]
        table = table.then(Unit(ids, coordinates, 0.0, 0.0).rows(number).after(table))
    whole = laid_out(*table.shape)
    assert table.places.tolist() == whole[..., :-1].tolist() == table.numbered().places.tolist()
    assert table.following == whole[..., -1].max() == whole[..., -1].min()
    moved = table.at(table.places + 9)
    assert moved.following == table.following + 9
    if axes and units:
        later = table.at(table.places + np.array([[5], [0], [0]]))  # a gap in time alone
        assert later.following == table.following


def shown(number: int) -> FrameRows:
    ids = np.array([7, VISUAL, VISUAL])
    tokens = torch.full((2, 64), float(number))
    unit = Unit(ids, np.zeros((0, 3), np.int64), float(number), float(number))
    return FrameRows(unit, tokens, True, EncodedFrame(float(number), tokens, tokens), number=number)


def test_the_archive_keeps_the_newest_frames_within_its_bytes() -> None:
    archive = Archive(10_000)
    for i in range(40):
        archive.add(shown(i))
        assert archive.bytes <= 10_000
        assert archive.seconds[-1] == i
    assert archive.bytes == sum(one.bytes for one in archive.found(Scope()))
    oldest = archive.seconds[0]
    assert oldest > 30
    assert [one.unit.seconds for one in archive.found(Scope(begin=36, end=38))] == [36, 37, 38]
    assert archive.found(Scope(end=oldest - 1)) == []
    assert [one.unit.seconds for one in evenly(archive.found(Scope()), 3)][-1] == 39
    assert len(evenly(archive.found(Scope()), 3)) == 3
    assert inside(np.array([np.nan, 1.0]), Scope()).tolist() == [False, True]


def test_a_policy_is_a_protocol_of_pure_functions() -> None:
    """The same rows, the same choice: nothing is kept between two calls."""
    rows = rows_of([5] * 20, 3)
    for name in POLICIES:
        policy: MemoryPolicy = policy_of(Memory(policy=name, carriers=4))
        assert dataclasses.is_dataclass(policy)
        first, second = policy.retain(rows, 60), policy.retain(rows, 60)
        assert first.keep.tolist() == second.keep.tolist()
        assert first.pooled.tolist() == second.pooled.tolist()


LONG = [("window", "gaps"), ("carrier", "renumber")]
SLOW = [("window", "renumber"), ("carrier", "gaps"), ("similarity", "reanchor"), ("recall", "gaps")]


@pytest.mark.parametrize(
    ("policy", "positions"), [*LONG, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
@pytest.mark.parametrize("frames", [2_000, pytest.param(5_000, marks=pytest.mark.slow)])
def test_positions_and_rows_stay_within_bounds_over_thousands_of_frames(
    policy: str, positions: str, frames: int
) -> None:
    """``frames`` of a model of 256 positions, whose questions run all rows: only the bookkeeping is at work here."""
    model = streaming_model(Attention.FULL, 0, max_tokens=256)
    kept = Streaming(model, 1, False, 256, np.arange(100, 104))
    state = StreamState(kept, Memory(policy=policy, positions=positions, budget=100, carriers=16, host_bytes=1 << 16))
    for i in range(frames):
        frame = state.units.chosen(shown(i))
        state.make_room(frame)
        rows = state.plan_append(frame, None)
        assert rows.new is None
        state.commit(rows, frame)
        if i % 16 == 0:
            now = state.branch(None).table
            assert len(now) <= 100
            assert now.places[-1] + kept.reserve < 256
            assert (np.diff(now.places) > 0).all()
            assert now.frame[-1] == i
    stats = state.stats()
    assert stats.frames == frames
    assert stats.feature_bytes <= 100 * 64 * 4 + (1 << 16)
