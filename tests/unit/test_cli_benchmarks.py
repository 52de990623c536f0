"""Each benchmark has the options that its code reads, and no others of its own."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmserve.cli import build_parser, main
from mmserve.cli.benchmarks import BENCHMARKS

#: Read by ``read_config``, which every benchmark with a model or a server calls.
CONFIGURATION = {"config", "model", "companion", "set"}
#: Read by ``reached``, which says how to be let in by a running server.
SERVER = {"server", "token_file", "token", "tls", "tls_ca", "tls_cert", "tls_key"}
#: Read by the command line itself.
COMMON = {"command", "name", "json", "verbose"}
#: Benchmarks in sections, which are modules of their own.
SECTIONED = ("video", "serve", "cluster")


def source(module: str) -> str:
    spec = find_spec(f"mmserve.bench.{module}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def read_by(module: str) -> set[str]:
    """Names of options that a benchmark's module, and those of its sections, read."""
    sections = import_module(f"mmserve.bench.{module}").SECTIONS.values() if module in SECTIONED else ()
    texts = [*map(source, (module, *sections))]
    names = {name for each in texts for name in re.findall(r"\barguments\.(\w+)", each)}
    if any("measured_policies" in each for each in texts):
        names |= {"recompute", "commit"}
    if any("named_tasks(arguments" in each or "run_sections(arguments" in each for each in texts):
        names |= {"tasks"}
    if any("reached(" in each for each in texts):
        names |= SERVER
    return names - CONFIGURATION


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_a_benchmark_has_the_options_that_it_reads(name: str) -> None:
    parser, _modules = build_parser()
    offered = set(vars(parser.parse_args(["bench", name]))) - COMMON - CONFIGURATION
    assert offered == read_by(BENCHMARKS[name].module)


def test_verbose_may_be_given_before_or_after_the_name() -> None:
    parser, _modules = build_parser()
    given = [["bench", "-v", "decode"], ["bench", "decode", "-v"], ["bench", "decode"]]
    assert [parser.parse_args(each).verbose for each in given] == [True, True, False]


def test_an_option_of_another_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser, _modules = build_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["bench", "peers", "--hours", "2"])
    assert "--hours" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", "decode"], ["plan", "--sweep"]])
def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*command, "--plot", "x.png"]) == 1
    assert "--plot needs matplotlib: pip install 'mmserve[plots]'" in capsys.readouterr().err
