"""Samplers: which frames they choose, whatever the pieces, and what travels with them."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmserve.encode.sampling import (
    FixedRate,
    Sampled,
    Sampler,
    Scene,
    SlowFast,
    feature,
    packed,
    unpacked,
)


def plain(seed: int, shade: int = 0) -> Image.Image:
    """A scene: blocks of colour, a little lighter or darker."""
    blocks = np.random.default_rng(seed).integers(20, 230, (6, 8, 3)).repeat(4, 0).repeat(4, 1) + shade
    return Image.fromarray(blocks.astype(np.uint8))


def chosen(sampler: Sampler, pieces: list[list[tuple[float, Image.Image]]]) -> list[Sampled]:
    """What a sampler chooses, sent to another process between two pieces."""
    found: list[Sampled] = []
    for piece in pieces:
        times = [seconds for seconds, _image in piece]
        for index in sampler.select(times, times[-1] if times else 0.0):
            if (frame := sampler.take(*piece[index])) is not None:
                found.append(frame)
        sampler = unpacked(json.loads(json.dumps(packed(sampler))))
    return found


GREY = Image.new("RGB", (4, 4))


@given(
    gaps=st.lists(st.integers(0, 3000), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    rate=st.sampled_from([0.3, 1.0, 2.0, 3.0, 7.5]),
)
def test_a_fixed_rate_gives_each_moment_its_first_frame_once(gaps: list[int], cuts: list[int], rate: float) -> None:
    times = (np.cumsum(gaps) / 1000).tolist()
    borders = [0, *sorted(min(cut, len(times)) for cut in cuts), len(times)]
    pieces = [[(t, GREY) for t in times[a:b]] for a, b in pairwise(borders)]
    found = [frame.seconds for frame in chosen(FixedRate(rate), pieces)]
    moments = range(int(times[-1] * rate) + 2)
    first = [min((t for t in times if t + 0.65e-3 >= k / rate), default=None) for k in moments]
    expected = sorted({t for t in first if t is not None})
    assert found == pytest.approx(expected, abs=1e-3) and len(found) == len(expected)
    assert all(second >= k / rate for second in found for k in [int(second * rate + 1e-9)])


def test_a_frame_just_before_its_moment_has_the_moments_time() -> None:
    """As Matroska's clock of milliseconds gives it: "7s" is not to become "6s"."""
    found = chosen(FixedRate(3.0), [[(0.0, GREY), (0.333, GREY), (0.667, GREY), (1.0, GREY)]])
    assert [frame.seconds for frame in found] == [0.0, 1 / 3, 0.667, 1.0]


@pytest.mark.parametrize("cuts", [[], [7], [1, 2, 3, 13, 29]])
def test_scenes_begin_where_frames_stop_being_alike(cuts: list[int]) -> None:
    """Scenes of 12, 3 and 15 frames, one every half second, each slowly growing lighter."""
    scenes = [0] * 12 + [1] * 3 + [2] * 15
    frames = [(0.5 * i, plain(scene, i)) for i, scene in enumerate(scenes)]
    borders = [0, *cuts, len(frames)]
    pieces = [frames[a:b] for a, b in pairwise(borders)]
    found = chosen(Scene(rate=2.0, frames=4, similarity=0.9), pieces)
    assert [round(2 * frame.seconds) for frame in found] == [0, 1, 2, 4, 12, 13, 14, 15, 16, 17, 19]
    assert [round(2 * frame.seconds) for frame in found if frame.detail] == [0, 12, 15]


def test_slow_frames_are_in_detail_and_fast_ones_are_not() -> None:
    pieces = [[(0.25 * i, GREY) for i in range(a, a + 6)] for a in (0, 6)]
    found = chosen(SlowFast(FixedRate(2.0), every=3), pieces)
    assert [frame.detail for frame in found] == [True, False, False, True, False, False]
    assert [frame.seconds for frame in found] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def test_alike_and_unlike() -> None:
    same, other = float(feature(plain(0)) @ feature(plain(0, 15))), float(feature(plain(0)) @ feature(plain(1)))
    assert same > 0.95 > 0.5 > other
    white, black = (feature(Image.new("RGB", (9, 9), colour)) for colour in ("white", "black"))
    assert float(white @ black) == pytest.approx(-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedRate(0.0),
        lambda: FixedRate(-1.0),
        lambda: FixedRate(float("nan")),
        lambda: FixedRate(1e9),
        lambda: Scene(frames=0),
        lambda: Scene(similarity=2.0),
        lambda: SlowFast(FixedRate(1.0), every=0),
    ],
)
def test_senseless_numbers_are_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]


def test_a_message_is_plain_json() -> None:
    for sampler in (FixedRate(2.0, 7), Scene(), SlowFast(Scene(rate=1.0), 4, 9)):
        again = unpacked(json.loads(json.dumps(packed(sampler))))
        assert again == sampler
