"""Reuse of images' K/V from outside: the client's option, the command line, and the benchmark that measures it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import picture

import mmserve.bench.reuse
from mmserve.__main__ import main
from mmserve.assembly import BackgroundServer
from mmserve.client import Blend, Client, KvShare, LegoLink, RandomReuse
from mmserve.config import Config, EngineConfig, ModelConfig, ServerConfig
from mmserve.core.request import ImagePart, Message, TextPart
from mmserve.errors import InvalidArgument


def test_a_picture_behind_text_is_reused() -> None:
    server = ServerConfig(port=0)
    engine = EngineConfig(torch_threads=1)
    models = (ModelConfig(path="bundled-causal"), ModelConfig(path="bundled"))
    asked = [Message("user", (TextPart("Look.\n"), ImagePart(picture(1)), TextPart("What colour is the circle?")))]
    with BackgroundServer(Config(server=server, engine=engine, models=models)) as s, Client(s.address) as client:
        client.wait_ready()
        causal, diffusion = (m.name for m in client.models())
        for rule, run_again in ((Blend(), 13), (LegoLink(0.5), 41), (RandomReuse(0.0), 0)):
            usage = client.generate(asked, model=causal, max_new_tokens=4, image_reuse=rule).usage
            assert (usage.visual_tokens, usage.reused_tokens) == (81, 81 - run_again)
        first, often = (
            client.generate(asked, model=causal, max_new_tokens=4, image_reuse=KvShare(each_step=n)) for n in (0, 9)
        )
        assert first.usage.reused_tokens == often.usage.reused_tokens == 81 - 13
        assert often.recomputed_tokens - first.recomputed_tokens == 9 * (often.forwards - 1) > 0
        assert s.engines[causal].stats().kv_cache.made == 1
        plain, whole = (
            client.generate(asked, model=causal, max_new_tokens=4, image_reuse=rule, tokens=True)
            for rule in (None, Blend(1.0))
        )
        assert plain.tokens == whole.tokens and whole.usage.reused_tokens == 0
        for policy in ("none", "dual"):
            plain, half = (
                client.generate(asked, model=diffusion, max_new_tokens=4, image_reuse=rule, recompute=policy)
                for rule in (None, LegoLink(0.5))
            )
            assert half.usage.reused_tokens == 40
            passes = plain.forwards if policy == "none" else 1  # of which run more than their block
            assert plain.forwards == half.forwards > 1
            assert plain.recomputed_tokens - half.recomputed_tokens == 40 * passes
        with pytest.raises(InvalidArgument, match=r"image_reuse\.blend\.recompute"):
            client.generate(asked, model=causal, image_reuse=Blend(1.5))
        with pytest.raises(InvalidArgument, match=r"image_reuse\.kv_share\.each_step"):
            client.generate(asked, model=causal, image_reuse=KvShare(each_step=65))
        with pytest.raises(InvalidArgument, match=r"that drafts .* set its each_step to 0"):
            client.generate(asked, model=causal, image_reuse=KvShare(), commit="ngram")


@pytest.mark.parametrize("model", ["bundled-causal", "bundled"])
def test_the_reuse_benchmark(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"SHARES": (0.3,), "LAYERS": (2,), "MANY": 2, "LONG_PROMPTS": 1}.items():
        monkeypatch.setattr(mmserve.bench.reuse, name, value)
    given = (
        "--model",
        model,
        "--limit",
        "1",
        *(("--commit", "threshold") if model == "bundled" else ()),
        "--tasks",
        "differs",
        "--set",
        "engine.torch_threads=1",
        "--json",
    )
    assert main(["bench", "reuse", *given]) == 0
    report = json.loads(capsys.readouterr().out)
    plain, nothing, *rules, everything = report["rows"]
    assert [row["measured"] for row in report["rows"]] == [
        "plain",
        "blend",
        "blend",
        "kv_share",
        "kv_share",
        "lego_link",
        "random_reuse",
        "blend",
    ]
    assert plain["nats"] == everything["nats"] == 0 and plain["same_answer"] == everything["same_answer"] == 1
    assert plain["prefill_rows"] == everything["prefill_rows"] == plain["prompt_tokens"]
    for row in rules:
        assert (
            row["nats"] > 0
            and row["decode_ms_per_pass"] > 0
            and nothing["prefill_rows"] < row["prefill_rows"] < plain["prefill_rows"]
        )
    assert main(["bench", "reuse", "--limit", "2", "--tasks", "arithmetic"]) == 1
    assert "--tasks: 'arithmetic' is not one of count" in capsys.readouterr().err


def test_the_command_line_reuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(picture(1))
    given = ("--model", "bundled-causal", "--image", str(file), "--max-new-tokens", "2", "--json")
    for rule, left in (("blend:recompute=0.5", 40), ("lego_link", 68)):
        assert main(["generate", "What is it?", *given, "--image-reuse", rule]) == 0
        assert json.loads(capsys.readouterr().out)["usage"]["reused_tokens"] == left
