"""``mmserve serve --check``: every problem of a configuration, in seconds and without serving."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from certificates import self_signed
from safetensors.torch import load_file, save_file

from mmserve.cli import main
from mmserve.models.names import shipped_folder

#: What each part of the file below is to be reported with.
BROKEN = {
    "unknown table 'sever'": "[sever]\nport = 1",
    "[server] has no key 'prot'": "[server]\nprot = 1\ntls_key = '/no/key'\ntls_certificate = '/no/certificate'",
    "cannot read /no/certificate": "",
    "[engine] stages must be": "[engine]\nstages = 'one'\npages = -1\nkv_bits = 4\nsparse_decode = 'quest'",
    "[engine] pages must be at least 0": "",
    "[engine] sparse attention reads K/V at full precision": "",
    "dtype 'float12' is not known": "[[models]]\ndtype = 'float12'",
    "no model directory /no/such/folder": "[[models]]\npath = '/no/such/folder'",
    "[[models]] 2 device must be a string": "[[models]]\ndevice = 3\nname = 'third'",
    "disk_folder /dev/null/x cannot be used: /dev/null is no folder": "[kv_cache]\ndisk_folder = '/dev/null/x'",
    "[schedulers.x]: diffusers has no class 'NoSuch'": "[schedulers.x]\nclass = 'NoSuch'",
    "cannot read the config file /no/cluster.toml": "",
}


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[bool, dict[str, str]]:
    """Whether all is in order, and the problems of each part."""
    code = main(["serve", "--check", "--json", "--set", "server.port=0", *arguments])
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert code == (0 if report["ok"] else 1) and err == ""
    parts: dict[str, str] = {}
    for finding in report["findings"]:
        parts[finding["part"]] = parts.get(finding["part"], "") + finding["problem"]
    return report["ok"], parts


def test_a_good_configuration_has_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = self_signed(tmp_path, "server")
    tls = ("--set", f"server.tls_certificate={certificate}", "--set", f"server.tls_key={key}")
    sample = Path(__file__).parents[2] / "deploy" / "mmserve.toml"
    ok, parts = checked(capsys, "--config", str(sample), "--companion", "bundled-causal", *tls)
    assert ok and set(parts) == {"configuration", "names of models", "port 0", "certificates", "model bundled"}
    assert main(["serve", "--check", "--set", "server.port=0", "--model", "bundled"]) == 0
    assert capsys.readouterr().out == "configuration: ok\nnames of models: ok\nport 0: ok\nmodel bundled: ok\n"


def test_every_problem_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("\n".join(BROKEN.values()))
    assert main(["serve", "--check", "--config", str(path), "--cluster", "/no/cluster.toml"]) == 1
    lines = capsys.readouterr().out.splitlines()
    problems = [line for line in lines if not line.endswith(": ok")]
    for words in BROKEN:
        assert sum(words in line for line in problems) == 1, (words, problems)
    assert len(problems) == len(BROKEN), problems


def test_a_problem_of_a_model_that_is_given_twice_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    twice = ("--model", "/no/such", "--model", "/no/such")
    assert main(["serve", "--check", "--set", "server.port=0", *twice]) == 1
    parts = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert parts == ["configuration", "names of models", "port 0", "model such"]


def test_models_that_are_no_tables_are_reported_beside_a_companion_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.toml"
    for text in ("[models]\npath = 'bundled'", "models = [1]"):
        path.write_text(text)
        ok, parts = checked(capsys, "--config", str(path), "--companion", "bundled-causal")
        assert not ok and "models" in parts["configuration"], parts


def test_a_taken_port_and_a_certificate_that_has_expired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, key = self_signed(tmp_path, "server", days=-1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tls = ("--set", f"server.tls_certificate={certificate}", "--set", f"server.tls_key={key}")
        ok, parts = checked(capsys, *tls, "--set", f"server.port={port}")
    assert not ok and "another program uses the port" in parts[f"port {port}"]
    assert "has expired" in parts["certificates"]


def test_a_model_is_checked_by_its_files_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("shape", "cut", "missing", "tokenizer"):
        shutil.copytree(shipped_folder("bundled"), tmp_path / name)
    tensors = load_file(tmp_path / "shape" / "model.safetensors")
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first][:1]}, tmp_path / "shape" / "model.safetensors")
    del tensors[first]
    save_file(tensors, tmp_path / "missing" / "model.safetensors")
    with (tmp_path / "cut" / "model.safetensors").open("rb+") as file:
        file.truncate(1_000_000)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    models = [part for name in ("shape", "cut", "missing", "tokenizer") for part in ("--model", str(tmp_path / name))]
    ok, parts = checked(capsys, *models)
    assert not ok
    assert f"tensor {first} has shape" in parts["model shape"]
    assert "not a readable safetensors file" in parts["model cut"]
    assert f"has no tensor {first}" in parts["model missing"]
    assert "tokenizer" in parts["model tokenizer"]


def test_adapters_that_need_more_memory_than_they_may_take(capsys: pytest.CaptureFixture[str]) -> None:
    ok, parts = checked(capsys, "--model", "bundled", "--set", "engine.adapter_bytes=1000000")
    assert not ok and "[engine] adapter_bytes is 1000000: drop one, or set it higher" in parts["model bundled"]


def test_pages_that_hold_less_than_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    pages = ("--set", "engine.pages=63", "--set")
    for more, wrong in (
        ("engine.max_tokens=1024", True),
        ("engine.max_tokens=1008", False),
        ("engine.max_queued=9", False),
    ):
        ok, parts = checked(capsys, "--model", "bundled", *pages, more)
        assert ok is not wrong and wrong is ("pages × page_size is 1008, less than" in parts["model bundled"])


def test_json_is_for_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--json", "--set", "server.port=0"]) == 1
    assert "--log-format json" in capsys.readouterr().err
