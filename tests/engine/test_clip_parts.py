"""A clip whose frames several encoders share is, bit for bit, the clip that one encoder makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from clips import clip, video_model
from helpers import ask, picture
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.config import MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.payloads import VisualPayload
from mmserve.core.request import Amount, ImagePart, Message, Request, TextPart, VideoPart, VideoSampling, Vision
from mmserve.core.share import MediaShare
from mmserve.encode import visual
from mmserve.encode.clip_parts import joined_parts
from mmserve.encode.decoders import InPlace
from mmserve.encode.decoding import DecodePool
from mmserve.encode.encoder import Encoder
from mmserve.encode.index import Index
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.transfer.payloads import PAYLOADS

FILE = clip(frames=60, rate=10, gop=7)
LIMITS = MediaConfig()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return video_model(stride=1, time="{seconds}s:", frames=20)


def encoder(model: LoadedModel, decoders: Any = None) -> Encoder:
    return Encoder(model, LIMITS, max_tokens=1024, decoders=decoders or InPlace(LIMITS))


def watching(sampling: VideoSampling | None = None, **vision: Any) -> Request:
    parts = (TextPart("a text"), ImagePart(picture(3)), VideoPart(FILE, sampling), TextPart("when?"))
    return replace(ask("r"), messages=(Message("user", parts),), vision=Vision(**vision))


def same(one: Encoded, other: Encoded) -> bool:
    assert one.features is not None and other.features is not None
    return np.array_equal(one.ids, other.ids) and torch.equal(one.features, other.features)


def shared(model: LoadedModel, request: Request, of: int) -> list[VisualPayload]:
    """What ``of`` encoders make of the request's image and clip, as it travels."""
    shares = [(MediaShare(1, part, of), *((MediaShare(0),) if part == 0 else ())) for part in range(of)]
    made = [encoder(model).encode_shares(request, each) for each in shares]
    return [PAYLOADS.decode(PAYLOADS.encode(each)) for each in made]


def tokens_of(payloads: Sequence[VisualPayload]) -> list[list[str]]:
    return [list(payload.entries) for payload in payloads]


@pytest.mark.parametrize("of", [2, 3, 5])
@pytest.mark.parametrize(
    "sampling",
    [None, VideoSampling(fps=5), VideoSampling(frames=17), VideoSampling(fps=10, detail_every=3)],
    ids=["own", "rate", "frames", "slow-fast"],
)
def test_parts_are_the_clip(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, of: int, sampling: VideoSampling | None
) -> None:
    request = watching(sampling)
    [whole] = encoder(model).encode([request])
    payloads = shared(model, request, of)
    assert all("/" in name for payload in payloads[1:] for name in payload.entries)
    last = encoder(model)
    last.add_encoded(request, payloads)

    def nothing(*_given: Any) -> Any:
        raise AssertionError("something is encoded again")

    monkeypatch.setattr(visual.ClipEncoder, "picture", nothing)
    monkeypatch.setattr(visual.MediaEncoder, "_make", nothing)
    [joined] = last.encode([request])
    assert same(whole, joined)


def test_a_pool_of_processes_decodes_a_part(model: LoadedModel) -> None:
    request, pool = watching(VideoSampling(fps=5)), DecodePool(LIMITS)
    pool.open()
    try:
        [here] = encoder(model).encode_shares(request, [MediaShare(1, 1, 3)]).entries.values()
        [there] = encoder(model, pool).encode_shares(request, [MediaShare(1, 1, 3)]).entries.values()
    finally:
        pool.close()
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(
    "request_",
    [
        watching(VideoSampling(scene_frames=3)),
        watching(pruner="column_attention", amount=Amount("keep_ratio", 0.5)),
        watching(VideoSampling(frames=4)),
    ],
    ids=["scenes", "pruned", "short"],
)
def test_a_clip_that_cannot_be_shared_is_the_first_one_s(model: LoadedModel, request_: Request) -> None:
    [whole] = encoder(model).encode([request_])
    payloads = shared(model, request_, 3)
    assert [len(payload.entries) for payload in payloads] == [2, 0, 0]
    last = encoder(model)
    last.add_encoded(request_, payloads)
    assert same(whole, last.encode([request_])[0])


def test_without_all_parts_the_clip_is_encoded_as_ever(model: LoadedModel) -> None:
    request = watching()
    payloads = shared(model, request, 3)
    last = encoder(model)
    last.add_encoded(request, [payloads[0], payloads[2]])
    [whole], [again] = encoder(model).encode([request]), last.encode([request])
    assert same(whole, again)


def test_parts_of_other_frames_than_planned_are_not_put_together(model: LoadedModel) -> None:
    entries = [dict(payload.entries) for payload in shared(model, watching(), 2)]
    parts = {int(name[-1]): dict(entry) for each in entries for name, entry in each.items() if "/" in name}
    assert joined_parts(parts, torch.device("cpu")) is not None
    assert joined_parts({1: parts[1]}, torch.device("cpu")) is None
    parts[1]["seconds"] = parts[1]["seconds"] + 0.01
    assert joined_parts(parts, torch.device("cpu")) is None


def test_a_damaged_file_is_refused_in_its_part(model: LoadedModel) -> None:
    damaged = FILE[: len(FILE) // 2] + bytes(len(FILE) // 4) + FILE[3 * len(FILE) // 4 :]
    request = replace(ask("r"), messages=(Message("user", (VideoPart(damaged),)),))
    failed = 0
    for part in range(3):
        try:
            encoder(model).encode_shares(request, [MediaShare(0, part, 3)])
        except InvalidArgument as error:
            failed += 1
            assert error.violations[0].field == "messages[0].parts[0].video"
    assert failed


@settings(deadline=None)
@given(st.data())
def test_shares_of_frames_are_all_of_them_in_order_and_of_like_cost(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 300))
    keys = sorted({0, *data.draw(st.lists(st.integers(0, count - 1), max_size=20))})
    wanted = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    of, step = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    index = Index(range(count), count, True, count, (0, 1), True, False, keys, keys)
    parts = [index.shared(wanted, part, of, step) for part in range(of)]
    assert [number for part in parts for number in part] == wanted
    ends = np.cumsum([len(part) for part in parts])
    assert all(end % step == 0 or end == len(wanted) for end in ends)
