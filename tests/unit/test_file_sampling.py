"""Which frames of a video file a request sees: by rate, count and scenes, in detail and compactly."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from clips import clip, video_model
from helpers import ask
from llama_checkpoints import edit, load
from llava_checkpoints import Llava, llava_onevision
from qwen_vl_checkpoints import Qwen
from shuffled_checkpoints import internvl_chat, smolvlm

from mmserve.config import EncoderCacheConfig, MediaConfig
from mmserve.core.encoded import Encoded
from mmserve.core.request import Amount, Message, Request, TextPart, VideoPart, VideoSampling, Vision
from mmserve.encode import encoder
from mmserve.encode.arriving import Arriving
from mmserve.encode.decoders import Decoders, InPlace
from mmserve.encode.decoding import DecodePool
from mmserve.encode.encoder import Encoder
from mmserve.encode.slow_fast import compacted
from mmserve.encode.visual import MediaEncoder
from mmserve.errors import InvalidArgument
from mmserve.models.base import LoadedModel
from mmserve.models.picture import Grid, Picture
from mmserve.prune.base import GridView
from mmserve.tiers.caches import Caches

FILE = clip(frames=60, rate=10)  # six seconds
TIMED = {"stride": 2, "mode": "average", "time": "{seconds}s:"}  # a label and one token a frame


def request_of(sampling: VideoSampling | None, file: bytes = FILE, **changes: Any) -> Request:
    message = Message("user", (VideoPart(file, sampling), TextPart("when?")))
    return replace(ask("r"), messages=(message,), **changes)


def encoded(
    model: LoadedModel, request: Request, *, cache: Caches | None = None, decoders: Decoders | None = None
) -> Encoded:
    [found] = Encoder(model, MediaConfig(), max_tokens=1024, cache=cache, decoders=decoders).encode([request])
    return found


def labels(model: LoadedModel, found: Encoded) -> list[str]:
    """The labels of the frames of a prompt."""
    text = model.tokenizer.decode([i for i in found.ids if i != model.spec.video_id])
    return [word for word in text.replace(":", ": ").split() if word.endswith("s:")]


def scenes(lengths: list[int]) -> bytes:
    """A file of a frame a second; each scene has a picture of its own."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=1, options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for scene, length in enumerate(lengths):
            for _ in range(length):
                blocks = np.random.default_rng(scene).integers(0, 256, (6, 8, 3), dtype=np.uint8)
                pixels = blocks.repeat(8, 0).repeat(8, 1)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (None, ["0s:", "2s:", "3s:", "5s:"]),
        (VideoSampling(fps=1), [f"{i}s:" for i in range(6)]),
        (VideoSampling(fps=0.5), ["0s:", "2s:", "4s:"]),
        (VideoSampling(frames=2), ["1s:", "4s:"]),
        (VideoSampling(frames=4, detail_every=2), ["0s:", "2s:", "3s:", "5s:"]),
    ],
)
def test_a_request_names_its_frames(sampling: VideoSampling | None, expected: list[str]) -> None:
    model = video_model(**TIMED)
    found = encoded(model, request_of(sampling))
    assert labels(model, found) == expected and len(found.image_rows) == len(expected)


def test_labels_are_those_that_the_model_was_taught() -> None:
    """Its labels begin again after 8 seconds, as in streams."""
    model = video_model(**TIMED)
    found = encoded(model, request_of(VideoSampling(fps=1), clip(frames=10, rate=1)))
    assert labels(model, found) == [f"{i % 8}s:" for i in range(10)]


def test_scenes_have_their_first_frame_in_detail() -> None:
    """Scenes of 5, 1 and 2 frames; four tokens in detail, one otherwise; frames 0, 1, 2 and 4 of a scene."""
    model = video_model(**{**TIMED, "stride": 1})
    file = scenes([5, 1, 2])
    found = encoded(model, request_of(VideoSampling(fps=1, scene_similarity=0.9), file))
    assert labels(model, found) == ["0s:", "1s:", "2s:", "4s:", "5s:", "6s:", "7s:"]
    gaps = np.diff(found.image_rows, prepend=-9) != 1
    assert np.diff(np.flatnonzero(gaps), append=len(found.image_rows)).tolist() == [4, 1, 1, 1, 4, 4, 1]
    fewer = encoded(model, request_of(VideoSampling(fps=1, scene_frames=1), file))
    assert labels(model, fewer) == ["0s:", "5s:", "6s:"]


def test_compact_frames_are_the_mean_of_their_tokens() -> None:
    """Also with a pruner, which judges the frames in detail alone."""
    model = video_model(**{**TIMED, "stride": 1})
    whole, slow = (encoded(model, request_of(VideoSampling(frames=4, detail_every=n))) for n in (1, 3))
    assert whole.features is not None and slow.features is not None
    frames = whole.features.split(4)
    expected = [frames[0], frames[1].mean(0, keepdim=True), frames[2].mean(0, keepdim=True), frames[3]]
    torch.testing.assert_close(slow.features, torch.cat(expected))
    amount = Vision(pruner="random", amount=Amount("token_budget", 4))
    pruned = encoded(model, request_of(VideoSampling(frames=4, detail_every=3), vision=amount))
    assert len(pruned.image_rows) == 4 + 2 and pruned.pruned == 4


def test_compact_frames_of_a_model_whose_positions_have_axes(tmp_path: Any) -> None:
    """Two frames make a grid of patches, which is in detail if either is."""
    model = Qwen(tmp_path, "qwen2_vl").load()
    whole, slow = (encoded(model, request_of(VideoSampling(frames=8, detail_every=n))) for n in (1, 4))
    each = len(whole.image_rows) // 4
    assert len(slow.image_rows) == 2 * (each + 1)
    assert whole.places is not None and slow.places is not None
    assert slow.places.shape == (3, len(slow.ids) + 1)


def test_text_and_separators_stay_where_frames_are_compact() -> None:
    tokens = torch.arange(12.0)[:, None]
    view = GridView(1, 3, {})
    grids = tuple(Grid(torch.tensor([4 * i, 4 * i + 1, 4 * i + 2]), view) for i in range(3))
    picture = Picture(tokens, grids, ("a", 4, "b", 4, "c", 4))
    found = compacted(picture, [False, True, False])
    assert found.pieces == ("a", 2, "b", 4, "c", 2)
    assert found.tokens[:, 0].tolist() == [1, 3, 4, 5, 6, 7, 9, 11]
    assert [grid.patches.tolist() for grid in found.grids] == [[2, 3, 4]]


SAMPLINGS = [
    None,
    VideoSampling(fps=1),
    VideoSampling(fps=2),
    VideoSampling(frames=3),
    VideoSampling(frames=4),
    VideoSampling(frames=4, detail_every=2),
    VideoSampling(detail_every=2),
    VideoSampling(fps=1, scene_frames=4),
    VideoSampling(fps=1, scene_frames=3),
    VideoSampling(fps=1, scene_similarity=0.2),
]


def test_no_sampling_gets_the_entry_of_another() -> None:
    """Whatever a shared cache was asked before, in any order."""
    model = video_model(**{**TIMED, "stride": 1})
    alone = [encoded(model, request_of(sampling)) for sampling in SAMPLINGS]
    for order in (range(len(SAMPLINGS)), reversed(range(len(SAMPLINGS)))):
        cache = Caches.of(EncoderCacheConfig())
        for i in (*order, *range(len(SAMPLINGS))):
            found, expected = encoded(model, request_of(SAMPLINGS[i]), cache=cache), alone[i]
            assert np.array_equal(found.ids, expected.ids)
            assert torch.equal(found.features, expected.features)  # type: ignore[arg-type]
        assert cache.tokens.stats().hits >= len(SAMPLINGS)


def test_a_process_samples_as_this_one_does() -> None:
    model, pool = video_model(**{**TIMED, "stride": 1}), DecodePool(MediaConfig())
    pool.open()
    try:
        for sampling in (VideoSampling(fps=2), VideoSampling(fps=2, scene_frames=2), VideoSampling(frames=5)):
            here, there = (encoded(model, request_of(sampling), decoders=d) for d in (InPlace(MediaConfig()), pool))
            assert np.array_equal(here.ids, there.ids)
            assert torch.equal(here.features, there.features)  # type: ignore[arg-type]
    finally:
        pool.close()


def test_too_many_frames_are_refused() -> None:
    limits = MediaConfig(max_sampled_frames=5)
    encoder = Encoder(video_model(), limits, max_tokens=1024)
    with pytest.raises(InvalidArgument, match=r"has 6 sampled frames; the limit is 5 \(\[media\] max_sampled"):
        encoder.encode([request_of(VideoSampling(fps=1))])
    encoder.encode([request_of(VideoSampling(fps=0.5))])


MODELS = {
    "llava": lambda _folder: video_model(**TIMED),
    "onevision": lambda folder: _with_videos(llava_onevision(folder), folder),
    "smolvlm": lambda folder: load(smolvlm(folder).folder),
    "internvl": lambda folder: load(internvl_chat(folder).folder),
}


def _with_videos(made: Llava, folder: Path) -> LoadedModel:
    edit(folder / "config.json", mm_video_frames=3)
    return load(made.folder)


@pytest.mark.parametrize("name", MODELS)
def test_frames_that_are_seen_as_they_come_are_those_of_the_whole_clip(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and so is the text between them; the row is foreseen from the times of the frames alone."""
    model = MODELS[name](tmp_path)
    foreseen: list[np.ndarray] = []
    planned = encoder._Arrivals.planned
    monkeypatch.setattr(encoder._Arrivals, "planned", lambda self, ids: (foreseen.append(ids), planned(self, ids))[1])
    request = request_of(VideoSampling(frames=20))
    arriving = Arriving(lambda _encoded: None, lambda _rows: None)
    one = Encoder(model, MediaConfig(), max_tokens=4096)
    with closing(one.load(request, arriving=arriving)) as loaded:
        assert not loaded.media.prepared, "no pixels are kept"
        [found] = one.encode([request], [loaded])
    assert arriving.encoded is not None and len(foreseen) == 1 and arriving.complete(found)
    monkeypatch.setattr(MediaEncoder, "_streams", lambda *_of: False)
    [expected] = Encoder(model, MediaConfig(), max_tokens=4096).encode([request])
    assert found.features is not None and expected.features is not None
    assert np.array_equal(found.ids, expected.ids) and torch.equal(found.features, expected.features)
    assert arriving.encoded.features is not None and torch.equal(arriving.encoded.features, expected.features)
