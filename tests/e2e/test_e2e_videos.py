"""Videos from the client to the answer and back, over gRPC, with a tiny model that takes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from clips import clip, silence, video_model
from e2e_helpers import EMPTY, PATIENCE, answer, settings, wait_for
from helpers import picture

from mmserve import assembly, cli
from mmserve.assembly import BackgroundServer
from mmserve.client import AsyncClient, Client, Finished, ImagePart, Message, TextPart, VideoPart, VideoSampling
from mmserve.config import ModelConfig
from mmserve.errors import InvalidArgument, NotFound, Unimplemented
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc

MODEL = "tiny"


@pytest.fixture(scope="module")
def videos() -> Iterator[BackgroundServer]:
    """A server of the tiny model: four frames a clip, each one token behind its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "load_model", lambda _config: video_model(stride=2, time="{seconds}s:"))
        config = settings(engine={"stages": "threads"}, media={"max_videos": 2})
        background = BackgroundServer(replace(config, models=(ModelConfig(path="bundled", name=MODEL),)))
    with background:
        yield background


@pytest.fixture
def client(videos: BackgroundServer) -> Iterator[Client]:
    """A client whose requests must leave nothing behind."""
    with Client(videos.address, timeout=PATIENCE) as found:
        yield found
    wait_for("an empty engine", lambda: videos.engines[MODEL].stats() == EMPTY)


def test_every_way_to_send_a_clip_gives_one_answer(client: Client, videos: BackgroundServer, tmp_path: Path) -> None:
    data = clip()
    file = tmp_path / "clip.mp4"
    file.write_bytes(data)
    first = client.generate("what moves?", videos=[data], max_new_tokens=8)
    assert first.usage.visual_tokens == 4
    others = [
        client.generate("what moves?", videos=[file], max_new_tokens=8),
        client.generate("what moves?", videos=[client.upload(file)], max_new_tokens=8),
        client.generate([Message("user", (VideoPart(data), TextPart("what moves?")))], max_new_tokens=8),
    ]
    assert [answer(other) for other in others] == [answer(first)] * 3
    last = list(client.stream("what moves?", videos=[data], max_new_tokens=8))[-1]
    assert isinstance(last, Finished) and answer(last) == answer(first)

    async def later() -> None:
        async with AsyncClient(videos.address, timeout=PATIENCE) as other:
            result = await other.generate("what moves?", videos=[data], max_new_tokens=8)
            assert answer(result) == answer(first)

    asyncio.run(later())


def test_clips_images_and_text_in_one_request(client: Client) -> None:
    parts = (
        TextPart("a"),
        VideoPart(clip(frames=2)),
        ImagePart(picture(0)),
        VideoPart(clip("matroska")),
        TextPart("?"),
    )
    result = client.generate([Message("user", parts)], max_new_tokens=4)
    assert result.usage.visual_tokens == 2 + 4 + 4
    turned = client.generate([Message("user", (parts[3], parts[0], *parts[1:3], parts[4]))], max_new_tokens=4)
    assert turned.usage == result.usage


def test_what_the_model_sees_depends_on_the_clip(client: Client) -> None:
    texts = {client.generate("x", videos=[clip(frames=n, size=(32, 32))], max_new_tokens=16).text for n in (1, 9, 40)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no video", "not a readable MP4"),
        (clip()[:-50], "cut off"),
        (silence(), "has no video stream"),
        (picture(0), "is an image"),
        (clip(frames=40, rate=1, times=[2 * i for i in range(40)]), "seconds; the limit is 60"),
    ],
    ids=["text", "cut off", "sound", "image", "too long"],
)
def test_files_that_are_no_video(client: Client, data: bytes, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as raised:
        client.generate("x", images=[picture(0)], videos=[data])
    assert raised.value.violations[0].field == "messages[0].parts[1].video"


def test_limits_and_ids(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="at most 2 videos, not 3"):
        client.generate("x", videos=[b"1"] * 3)
    with pytest.raises(NotFound, match="upload it"):
        client.generate("x", videos=["sha256:" + "0" * 64])
    assert client.generate("what is <video>?", max_new_tokens=4).usage.visual_tokens == 0


def test_a_bad_clip_fails_alone(client: Client, videos: BackgroundServer) -> None:
    data = clip()
    alone = answer(client.generate("x", videos=[data], max_new_tokens=4))

    async def together() -> list[object]:
        async with AsyncClient(videos.address, timeout=PATIENCE) as other:
            calls = [other.generate("x", videos=[d], max_new_tokens=4) for d in (data, data[:-50], data)]
            return await asyncio.gather(*calls, return_exceptions=True)

    first, bad, last = asyncio.run(together())
    assert isinstance(bad, InvalidArgument)
    assert answer(first) == answer(last) == alone


def test_what_the_server_says_of_its_model(client: Client) -> None:
    info = client.describe()
    assert (info.videos, info.max_videos, info.frames_per_video, info.max_video_seconds) == (True, 2, 4, 60.0)
    assert info.max_video_bytes == info.max_image_bytes


def test_a_clients_raw_message(videos: BackgroundServer) -> None:
    part = pb.ContentPart(video=pb.Video(data=clip()))
    message = pb.GenerateRequest(messages=[pb.ChatMessage(role=pb.ROLE_USER, parts=[part])])
    message.sampling.max_new_tokens = 4
    with grpc.insecure_channel(videos.address) as channel:
        *_rest, last = generation_pb2_grpc.GenerationServiceStub(channel).Generate(message, timeout=PATIENCE)
    assert last.finished.usage.visual_tokens == 4


def test_command_line(videos: BackgroundServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "clip.mkv"
    file.write_bytes(clip("matroska"))
    asked = ["generate", "what moves?", "--video", str(file), "--max-new-tokens", "8", "--server", videos.address]
    assert cli.main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["visual_tokens"] == 4
    assert cli.main(["models", "--server", videos.address]) == 0
    assert "up to 2 videos of 60 s, 4 frames each" in capsys.readouterr().out
    assert cli.main(["generate", "x", "--video", str(tmp_path / "none.mp4"), "--server", videos.address]) == 1
    assert "none.mp4" in capsys.readouterr().err


def test_which_frames_a_request_asks_for(client: Client) -> None:
    data = clip(frames=60)  # six seconds
    tokens = {
        sampling: client.generate("x", videos=[data], video_sampling=sampling, max_new_tokens=4).usage.visual_tokens
        for sampling in (None, VideoSampling(fps=1), VideoSampling(frames=3), VideoSampling(fps=2, detail_every=2))
    }
    assert list(tokens.values()) == [4, 6, 3, 12]
    parts = (VideoPart(data, VideoSampling(fps=1)), VideoPart(data), TextPart("x"))
    assert client.generate([Message("user", parts)], max_new_tokens=4).usage.visual_tokens == 6 + 4
    uploaded = client.generate("x", videos=[client.upload(data)], video_sampling=VideoSampling(fps=1), max_new_tokens=4)
    assert uploaded.usage.visual_tokens == 6


def test_samplings_that_are_refused(client: Client) -> None:
    asked = VideoSampling(fps=31.0, frames=769, scene_similarity=2.0, scene_frames=65, detail_every=0)
    with pytest.raises(InvalidArgument) as raised:
        client.generate("x", videos=[clip()], video_sampling=asked)
    path = "messages[0].parts[0].video.sampling"
    found = {violation.field: violation.description for violation in raised.value.violations}
    assert found == {
        f"{path}.fps": "must be in (0, 30], not 31.0",
        f"{path}.frames": "must not be set with fps, scene_similarity or scene_frames: they are other rules",
        f"{path}.scene_similarity": "must be in [-1, 1], not 2.0",
        f"{path}.scene_frames": "must be in [1, 64], not 65",
        f"{path}.detail_every": "must be at least 1, not 0",
    }
    with pytest.raises(InvalidArgument, match=r"at most 768 \(\[media\] max_sampled_frames of the server\), not 769"):
        client.generate("x", videos=[clip()], video_sampling=VideoSampling(frames=769))
    with pytest.raises(InvalidArgument, match=r"must be in \(0, 30\]"):
        client.generate("x", videos=[clip()], video_sampling=VideoSampling(fps=float("nan")))
    with pytest.raises(InvalidArgument, match=r"video_sampling\.frames: cannot be -1"):
        client.generate("x", videos=[clip()], video_sampling=VideoSampling(frames=-1))


def test_the_command_line_names_frames(
    videos: BackgroundServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(clip(frames=60))
    asked = ["generate", "x", "--video", str(file), "--max-new-tokens", "4", "--server", videos.address, "--json"]
    assert cli.main([*asked, "--video-sampling", "fps=1,detail_every=2"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["visual_tokens"] == 6
    for wrong in ("rate=1", "fps=x", "fps", "fps=1,fps=2"):
        with pytest.raises(SystemExit):
            cli.main([*asked, "--video-sampling", wrong])
        assert "--video-sampling" in capsys.readouterr().err


def test_a_model_without_videos_says_so() -> None:
    with pytest.MonkeyPatch.context() as patch:
        from helpers import tiny_model

        patch.setattr(assembly, "load_model", lambda _config: tiny_model(vision=True))
        background = BackgroundServer(settings())
    with background, Client(background.address, timeout=PATIENCE) as client:
        with pytest.raises(Unimplemented, match="takes no videos"):
            client.generate("x", videos=[clip()])
        assert not client.describe().videos
