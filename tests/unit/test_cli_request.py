"""``mmserve generate`` can set everything that a request can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmserve.cli import build_parser, main
from mmserve.cli.request import by_flags, request_options
from mmserve.client import Blend, EarlyCommit, HeavyHitters, Learned, Options, Threshold, VideoSampling
from mmserve.errors import InvalidArgument


def options(*arguments: str) -> Options:
    parser, _modules = build_parser()
    return request_options(parser.parse_args(["generate", "What is it?", *arguments]))


def test_every_option_of_a_request_can_be_given() -> None:
    """``model`` is chosen by ``--model``."""
    assert set(options()) == set(Options.__annotations__) - {"model"}


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--commit", "threshold"], "commit", "threshold"),
        (["--commit", "threshold:confidence=0.8"], "commit", Threshold(0.8)),
        (["--commit", "learned:end_of_text=false"], "commit", Learned(end_of_text=False)),
        (
            ["--commit", "early_commit:base=factor,answer_length=4"],
            "commit",
            EarlyCommit(base="factor", answer_length=4),
        ),
        (
            ["--commit", "early_commit:base=threshold(confidence=0.8),late=3"],
            "commit",
            EarlyCommit(base=Threshold(0.8), late=3.0),
        ),
        (["--kv-reduction", "heavy_hitters:budget=64"], "kv_reduction", HeavyHitters(64)),
        (["--image-reuse", "blend:recompute=0.3,layers=4"], "image_reuse", Blend(0.3, 4)),
        (["--video-sampling", "fps=2"], "video_sampling", VideoSampling(fps=2)),
        (["--stop", "a", "--stop", "b"], "stop", ["a", "b"]),
        (["--steps", "8"], "steps", 8),
        (["--max-pixels", "784"], "max_pixels", 784),
        (["--video-min-pixels", "784"], "video_min_pixels", 784),
        (["--min-p", "0.1"], "min_p", 0.1),
    ],
)
def test_an_option_reaches_the_request(arguments: list[str], name: str, value: Any) -> None:
    found: dict[str, Any] = {**options(*arguments)}
    assert found[name] == value


def test_a_grammar_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "answer.gbnf"
    path.write_text('root ::= "é"', encoding="utf-8")
    assert options("--grammar", str(path))["grammar"] == 'root ::= "é"'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--commit", "threshold:sureness=1"], "pairs KEY=VALUE of confidence, not 'sureness=1'"),
        (["--commit", "threshold:confidence=much"], "confidence must be a number, not 'much'"),
        (["--commit", "learned:end_of_text=1"], "end_of_text must be true or false"),
        (["--commit", "best"], "must be one of confident, draft_model, early_commit, "),
        (["--recompute", "threshold"], "must be one of adaptive, block, dkv_decode, "),
        (["--commit", "low_confidence:steps=2"], "'low_confidence' is not a policy with parameters"),
        (["--kv-reduction", "sink_window:sinks=2"], "budget is missing: add budget=VALUE"),
        (["--regex", "a", "--grammar", "file"], "not allowed with argument --regex"),
    ],
)
def test_wrong_numbers_of_a_policy_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--image", "--video", "--schema", "--grammar", "--template", "--chat", "--tools"])
def test_a_missing_file_is_named_with_its_option(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "What is it?", flag, "missing.file"]) == 1
    assert capsys.readouterr().err == f"mmserve generate: {flag}: there is no file missing.file\n"


@pytest.mark.parametrize("flag", ["--image", "--video"])
def test_a_missing_file_of_a_typed_question(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", "", "--yes-no", "Is it red?", flag, "missing.file"]) == 1
    assert capsys.readouterr().err == f"mmserve decide: {flag}: there is no file missing.file\n"


def test_options_that_may_be_repeated_are_described_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in ("--image FILE|ID", "--video FILE|ID", "--stop TEXT", "--choice TEXT"):
        described = text.rpartition(f" {flag} ")[2]
        assert "may be repeated" in described.partition(" --")[0], flag
    assert "default false" in text and "default False" not in text and "default True" not in text


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("constraint.regex", "--regex"),
        ("constraint.json_schema", "--schema"),
        ("constraint.choice[2]", "--choice (constraint.choice[2])"),
        ("constraint.lark", "--grammar"),
        ("constraint.json_schema#/properties/a", "--schema (constraint.json_schema#/properties/a)"),
        ("diffusion.threshold.confidence", "--commit (diffusion.threshold.confidence)"),
        ("diffusion.dkv_decode.refresh", "--recompute (diffusion.dkv_decode.refresh)"),
        ("diffusion.min_quality", "--quality"),
        ("vision", "--pruner"),
        ("vision.keep_ratio", "--keep-ratio"),
        ("messages[0].parts[1].image.url", "--image (messages[0].parts[1].image.url)"),
        ("messages[0].parts[0].video", "--video (messages[0].parts[0].video)"),
        ("messages[0].parts[0].video.sampling.fps", "--video-sampling (messages[0].parts[0].video.sampling.fps)"),
        ("sampling.top_p", "--top-p"),
        ("max_new_tokens", "--max-new-tokens"),
        ("input.messages[0]", "input.messages[0]"),
    ],
)
def test_errors_name_the_option_that_sets_a_field(field: str, flag: str) -> None:
    assert str(by_flags(InvalidArgument.of(field, "is wrong"))) == f"{flag}: is wrong"
