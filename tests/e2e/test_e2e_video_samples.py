"""The samples and the demo about video, and times in answers, on the bundled causal model."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import random
import runpy
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image

from mmserve.assembly import BackgroundServer
from mmserve.cli import main
from mmserve.client import AsyncClient, Client, InvalidArgument, Moment, ToolCallDelta
from mmserve.config import Config, EngineConfig, ModelConfig, ServerConfig
from mmserve.reference.scenes import PICTURE, Shape, paint

SAMPLES = Path(__file__).parents[2] / "samples"


def sample(name: str) -> dict[str, Any]:
    return runpy.run_path(str(SAMPLES / f"{name}.py"))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    config = Config(
        server=ServerConfig(port=0),
        engine=EngineConfig(torch_threads=1, max_running=8),
        models=(ModelConfig(path="bundled-causal"),),
    )
    with BackgroundServer(config) as server:
        yield server.address


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six seconds: an empty scene, from 2 to 4 s with a red circle."""
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=10, options={"g": "10", "crf": "10"})
        stream.width = stream.height = PICTURE
        stream.pix_fmt, stream.thread_count = "yuv444p", 1
        for number in range(60):
            shown = (Shape("circle", "red", "large", 1, 1),) if 20 <= number < 40 else ()
            frame = av.VideoFrame.from_image(paint(shown, random.Random(0)))
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def test_alerts_to_a_csv(address: str, film: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sample("alerts")["main"]([str(film), "Is there a red circle?", "--server", address]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["seconds", "question", "true", "probability", "mass"]
    assert [(float(row[0]), row[2]) for row in rows[1:]] == [(2.0, "1"), (4.0, "0")]


def test_questions_about_a_film_and_a_picture_of_each_answer(
    address: str, film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("How many shapes are there?\n\nWhat moves?\n"))
    arguments = [str(film), "--server", address, "--out", str(tmp_path), "--at-once"]
    assert sample("video_qa")["main"](arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("[5.5 s]") and "->" in line for line in lines)
    for name in ("answer-1.png", "answer-2.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.height == 408


def test_a_camera_is_asked_and_network_addresses_only_where_allowed(
    address: str, film: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    camera = sample("camera_qa")
    assert camera["checked"]("rtsp://cam.example/1", ["cam.example"])["protocol_whitelist"] == "rtsp,rtp,udp,tcp"
    for source in ("rtsp://other.example/1", "http://169.254.169.254/", "concat:a|b", "gopher://cam.example/"):
        with pytest.raises(ValueError):
            camera["checked"](source, ["cam.example"])
    with pytest.raises(SystemExit):
        camera["main"](["http://localhost/", "--server", address])
    assert "--allow localhost" in capsys.readouterr().err
    options = camera["checked"](str(film), [])
    assert len(list(camera["pictures"](str(film), None, options, float("inf")))) == 60


def test_an_answer_to_a_schema(address: str, film: Path) -> None:
    with Client(address, timeout=20) as client, client.video_session() as session:
        session.push_file(film)
        answer = session.ask("Is there a red circle?", schema={"enum": ["yes", "no"]}, max_new_tokens=16)
        assert answer.parsed in ("yes", "no")


def test_the_demo_plays_a_session_and_judges_it(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["demo", "--video", "--seconds", "12", "--json", "--server", address, "--save", str(tmp_path / "new")]
    assert main(given) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["ok"] and report["frames_taken"] == report["frames_pushed"] == 12
    assert [each["seconds"] for each in report["answers"]] == [5.5, 11.5]  # when the two clips end
    for each in report["answers"]:
        assert each["answer"] and not each["error"] and 0 < each["first_token_ms"] <= each["total_ms"]
        assert each["correct"] == (each["answer"] == each["expected"])
        assert f"{each['question']} {each['on_clock']}" in err
    assert report["right"] == sum(each["correct"] for each in report["answers"])
    assert len(report["watches"]) == 2
    for watch in report["watches"]:
        assert watch["truth"] and watch["alerts"]
        assert watch["right"] == sum(turn in watch["truth"] for turn in watch["alerts"]) > 0
    assert err.count("alert: ") == sum(len(watch["alerts"]) for watch in report["watches"])
    assert report["frame_to_ready_ms"] > 0 and report["first_token_ms"] > 0
    assert len(list((tmp_path / "new").glob("frame-*.png"))) == 12


def test_the_video_demo_refuses_a_video_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--video", "--seconds", "0"]) == 1
    assert "--seconds" in capsys.readouterr().err


#: An empty scene in seconds 100 to 102, a red circle in seconds 103 to 105.
FRAMES = [(100.5 + i, paint((Shape("circle", "red", "large", 1, 1),)[: i // 3], random.Random(0))) for i in range(6)]
WHEN = "When does the red circle appear?"


def test_times_in_answers_are_told_on_the_sessions_clock(address: str) -> None:
    with Client(address) as client, client.video_session() as session:
        for seconds, frame in FRAMES:
            session.push(frame, seconds)
        question = session.stream(WHEN, regex="it appears at 7 s")  # second 103 has the label 7
        result = question.result()
        assert result.moments == question.moments == (Moment(11, 17, 103),)
        assert session.ask(WHEN, regex="at 4 s or at 2 s", max_new_tokens=24).moments == (Moment(0, 6, 100),)
        both = session.ask(WHEN, regex="at [4-5] s", n=2, temperature=1.0, seed=0)
        for sample in both.samples:
            assert sample.moments == (Moment(0, 6, 96 + int(sample.text[3])),)
        for text in ("for 3 s", "at 9 s"):
            assert session.ask(WHEN, regex=text).moments == ()
        session.push(FRAMES[0][1], 109.5)
        assert session.ask(WHEN, regex="at 5 s").moments == (Moment(0, 6, 109, ambiguous=True),)
        assert session.ask(WHEN, regex="at 5 s", scope=(100, 106)).moments == (Moment(0, 6, 101),)


def test_times_in_answers_by_asyncio(address: str) -> None:
    async def asked() -> tuple[tuple[Moment, ...], ...]:
        async with AsyncClient(address) as client, client.video_session() as session:
            for seconds, frame in FRAMES:
                await session.push(frame, seconds)
            question = session.stream(WHEN, regex="2 seconds ago")
            return (await question.result()).moments, question.moments

    assert asyncio.run(asked()) == ((Moment(0, 13, 103),),) * 2


def test_calls_of_tools_in_answers_of_a_session(address: str, film: Path) -> None:
    schema = {"type": "object", "properties": {"on": {"enum": [True, False]}}, "required": ["on"]}
    odd = {"type": "object", "properties": {"on": {"type": "strange"}}}
    options: Any = {"tool_choice": "required", "parallel_tool_calls": False, "max_new_tokens": 64}
    with Client(address) as client, client.video_session(rate=2.0) as session:
        session.push_file(film)
        question = session.stream("Is it on?", tools=[{"name": "switch", "parameters": schema}], **options)
        deltas = [event for event in question if isinstance(event, ToolCallDelta)]
        found = question.result()
        [call] = found.calls
        assert (call.name, found.text, found.finish_reason) == ("switch", "", "tool_calls") and "on" in call.value
        assert "".join(delta.arguments for delta in deltas) == call.arguments and deltas[0].id == call.id
        [whole] = session.ask("Is it on?", tools=[{"name": "switch", "parameters": schema}], **options).calls
        assert whole.arguments == call.arguments
        with pytest.raises(InvalidArgument, match=r"tools\[0\]\.parameters_json_schema#/properties/on/type"):
            session.ask("Is it on?", tools=[{"name": "switch", "parameters": odd}], **options)
