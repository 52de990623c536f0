"""``mmserve tune`` from prompts to a file, and a server that takes it as its default."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import running, settings

from mmserve.cli import main
from mmserve.config import BUNDLED, ModelConfig
from mmserve.models.names import shipped_folder
from mmserve.reference.evaluate import item, media_files
from mmserve.reference.images import schema_asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a broken policy file, and prompts about two scenes."""
    path = tmp_path_factory.mktemp("tuned") / "model"
    shutil.copytree(shipped_folder(BUNDLED), path)
    (path / "policy.json").write_text("{")
    lines: list[dict[str, Any]] = []
    for index, task in enumerate(("color", "json")):
        scene, question = item(task, index, 3)
        (path.parent / f"{task}.png").write_bytes(media_files(task, scene)["images"][0])
        asked: dict[str, Any] = {"text": question.text, "images": [f"{task}.png"], "max_new_tokens": 16}
        if task == "json":
            asked |= {"schema": schema_asked(question.text), "max_new_tokens": 48}
        lines.append(asked | {"truth": question.answer if task == "color" else json.loads(question.answer)})
    (path.parent / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def report(folder: Path) -> Iterator[dict[str, Any]]:
    """What one run of the command printed."""
    from contextlib import redirect_stdout
    from io import StringIO

    out = StringIO()
    prompts = str(folder.parent / "prompts.jsonl")
    with redirect_stdout(out):
        assert main(["tune", "--model", str(folder), "--prompts", prompts, "--repeats", "1", "--json"]) == 0
    yield json.loads(out.getvalue())


def test_the_curve_is_measured_and_replaces_the_broken_file(folder: Path, report: dict[str, Any]) -> None:
    file = json.loads((folder / "policy.json").read_text())
    assert file["curve"] == report["curve"] and report["out"] == str(folder / "policy.json")
    plain = file["curve"][0]
    assert (plain["recompute"], plain["commit"]) == ({"name": "none"}, {"name": "low_confidence"})
    assert (plain["quality"], plain["time_ratio"], plain["same"]) == (1.0, 1.0, 1.0)
    assert len(file["curve"]) >= 10 and min(row["forwards"] for row in file["curve"]) < plain["forwards"] / 4
    assert file["measured"]["with_truth"] == 2 and file["measured"]["with_schema"] == 1


def test_a_server_takes_the_file_as_its_default(folder: Path, report: dict[str, Any]) -> None:
    from dataclasses import replace

    with running(replace(settings(), models=(ModelConfig(path=str(folder), name="bundled"),))) as served:
        info = served.client.describe()
        assert info.tuning is not None and info.tuning.source == "policy.json"
        assert str(info.tuning.default) == report["default"]
        assert len(info.tuning.curve) == len(report["curve"])
        asked = {"prompt": "Is there a red circle?", "max_new_tokens": 16}
        fast, plain = served.client.generate(**asked), served.client.generate(**asked, quality="exact")
        assert fast.forwards < plain.forwards


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "bundled", "--out", "/nowhere/at/all.json"), "--out"),
        (("--model", "bundled", "--model", "bundled-causal"), "one model"),
        (("--model", "bundled", "--limit", "0"), "at least 1"),
        (("--model", "bundled", "--out", "OUT", "--prompts", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--model", "COPY"), "--prompts"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    places = {"OUT": str(tmp_path / "out.json"), "COPY": str(folder)}
    assert main(["tune", *(places.get(a, a) for a in arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and said in err.splitlines()[-1] and "Traceback" not in err
