"""The files of ``deploy/`` that name metrics: our dashboard, our alerts, and which panels of vLLM's dashboards work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmserve.observe.aliases import SHARED

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
#: What each panel of vLLM's dashboards asks for (``vllm-project/vllm``, below ``examples/observability/``).
VLLM: dict[str, dict[str, list[str]]] = json.loads((ROOT / "tests/data/vllm_dashboards.json").read_text())

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LABELS = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"\{([^}]*)\}")
_METRIC = re.compile(r"(?<![\w:$])([a-zA-Z_][\w]*:[\w:]+|(?:grpc_server|process|http)_\w+|up)(?![\w:(])")
#: Labels that Prometheus adds to what it reads.
ADDED = frozenset({"instance", "job", "le"})


@dataclass(frozen=True)
class Panel:
    """A panel of our dashboard."""

    row: str
    title: str
    description: str
    expressions: tuple[str, ...]


def metrics(expression: str) -> set[str]:
    """Names of the series that a PromQL expression reads."""
    bare = _LABELS.sub("", _SELECTOR.sub("", _STRING.sub('""', expression)))
    return set(_METRIC.findall(bare))


def labels(expression: str) -> set[str]:
    """Names of labels that it selects or groups by, but for those that Prometheus adds."""
    found = {name.strip() for names in _LABELS.findall(expression) for name in names.split(",")}
    for selector in _SELECTOR.findall(expression):
        found |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    return found - ADDED - {""}


def family(name: str) -> str:
    """The family of a series."""
    return re.sub(r"_(bucket|sum|count|total)$", "", name)


def dashboard() -> dict[str, Any]:
    """Our dashboard."""
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/mmserve.json").read_text())
    return found


def panels() -> Iterator[Panel]:
    """Its panels, in order."""
    row = ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        yield Panel(row, panel["title"], panel["description"], tuple(target["expr"] for target in panel["targets"]))


def alerts() -> list[dict[str, Any]]:
    """Our alerts."""
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def unserved(names: list[str]) -> set[str]:
    """Those metrics of a panel of vLLM's that a server of ours does not have."""
    shared = {f"vllm:{name}" for name in SHARED}
    return {name for name in names if family(name) not in shared and name != "up"}
