"""A filter trained by the command, found beside the model's weights, and used by requests over gRPC."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from e2e_helpers import Running, running, settings
from safetensors import safe_open

from mmserve.cli import main
from mmserve.client import EarlyCommit, Learned, Result
from mmserve.config import BUNDLED, ModelConfig
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.commit_filter import FILTER
from mmserve.models.names import shipped_folder
from mmserve.reference.evaluate import item, media_files

TASKS = ("arithmetic",)
#: Tokens of an answer: twice as many as the sums here have.
ROOM = 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled model without a filter, and with one trained on a few sums."""
    plain, filtered = (tmp_path_factory.mktemp(name) / "model" for name in ("plain", "filtered"))
    for folder in (plain, filtered):
        shutil.copytree(shipped_folder(BUNDLED), folder, ignore=shutil.ignore_patterns(FILTER))
    prompts = filtered.parent / "prompts.txt"
    prompts.write_text("\n".join(item("arithmetic", index, 9)[1].text for index in range(6)))
    threads = torch.get_num_threads()
    few = ("--limit", "6", "--max-new-tokens", str(ROOM), "--steps", "300")
    assert main(["train-filter", "--model", str(filtered), "--prompts", str(prompts), *few]) == 0
    torch.set_num_threads(threads)
    return plain, filtered


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path]) -> Iterator[Running]:
    """Both models on one server, the one with a filter as ``bundled``."""
    models = tuple(ModelConfig(path=str(f), name=n) for f, n in zip(folders, ("plain", "bundled"), strict=True))
    with running(replace(settings(), models=models)) as found:
        yield found
        found.assert_serves()


def answers(served: Running, **changes: object) -> list[Result]:
    """By plain decoding, but for ``changes``."""
    options = {"recompute": "none", "commit": "low_confidence", **changes}
    found = []
    for task in TASKS:
        thing, question = item(task, 0, 0)
        media = media_files(task, thing)
        found.append(
            served.client.generate(question.text, media["images"], model="bundled", max_new_tokens=ROOM, **options)
        )
    return found


@pytest.fixture(scope="module")
def plain(served: Running) -> list[Result]:
    """The answers by plain decoding."""
    return answers(served)


def test_the_record_of_its_training_is_in_the_file(folders: tuple[Path, Path]) -> None:
    with safe_open(folders[1] / FILTER, framework="numpy") as file:
        record = json.loads(file.metadata()["record"])
    assert (record["prompts"], record["seed"], record["steps"]) == (6, 0, 300)
    assert set(record["held_out"]["decoding"]) == {"low_confidence", "learned", "threshold"}


def test_a_model_with_a_filter_answers_in_fewer_passes(served: Running, plain: list[Result]) -> None:
    assert "learned" in served.client.describe("bundled").commit_policies
    fast = answers(served, commit=Learned())
    assert sum(r.forwards for r in fast) < sum(r.forwards for r in plain) / 2
    assert all(r.text for r in fast)
    by_name = answers(served, commit="learned")
    assert [(r.text, r.forwards) for r in by_name] == [(r.text, r.forwards) for r in fast]
    over = answers(served, commit=EarlyCommit(early=99, middle=99, late=99, base=Learned()))
    assert [(r.text, r.forwards) for r in over] == [(r.text, r.forwards) for r in fast]


def test_without_trust_it_is_the_baseline_and_an_end_of_text_only_saves_passes(
    served: Running, plain: list[Result]
) -> None:
    same = answers(served, commit=Learned(1.5, end_of_text=False))
    assert [(r.text, r.forwards) for r in same] == [(r.text, r.forwards) for r in plain]
    closed = answers(served, commit=Learned(1.5))
    assert [r.text for r in closed] == [r.text for r in plain]
    assert sum(r.forwards for r in closed) <= sum(r.forwards for r in plain)


def test_a_model_without_a_filter_says_how_to_get_one(served: Running) -> None:
    assert "learned" not in served.client.describe("plain").commit_policies
    for commit in (Learned(), "learned", EarlyCommit(base=Learned())):
        with pytest.raises(Unimplemented, match=r"policy 'learned'.*mmserve train-filter --model"):
            served.client.generate("1 + 1 =", model="plain", commit=commit, max_new_tokens=4)
    with pytest.raises(InvalidArgument, match=r"diffusion\.learned\.threshold"):
        served.client.generate("1 + 1 =", model="bundled", commit=Learned(-1.0), max_new_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "bundled-causal", "--prompts", "/nowhere/at/all"), "diffusion"),  # whatever it were asked
        (("--limit", "3"), "too few"),
        (("--prompts", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--out", "/nowhere/at/all"), "copy it into the model's folder as commit_filter.safetensors"),
        (("--steps", "0"), "--steps and --threads must be at least 1"),
        (("--limit", "-1"), "--limit, --max-new-tokens"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["train-filter", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and said in err.splitlines()[-1] and "Traceback" not in err
