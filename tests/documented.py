"""Tables of the documentation that are made of declared values: ``python tests/documented.py`` writes them anew.

A page has ``<!-- values: NAME -->`` before such a table, and an empty line after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from deployed import VLLM, alerts, panels, unserved

from mmserve.config import SECTIONS, ModelConfig, TenantConfig
from mmserve.core.options import REQUEST
from mmserve.core.policies import CLASSES, KINDS, policy_names
from mmserve.core.request import VideoSampling
from mmserve.core.session import FrameSampling, Memory
from mmserve.core.slo import SLO
from mmserve.core.values import Value, values
from mmserve.http.described import BODIES

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "deploy" / "mmserve.toml"
_MARK = re.compile(r"(?P<mark><!-- values: (?P<name>[\w.]+) -->\n)(?P<table>(?:\|[^\n]*\n)*)")
#: How the table of fields names APIs, by their paths.
APIS = {
    "/v1/chat/completions": "c",
    "/v1/completions": "t",
    "/v1/fim/completions": "f",
    "/v1/responses": "r",
    "/v1/messages": "m",
    "/v1/messages/count_tokens": "n",
    "/v1/decisions": "d",
    "/v1/systemone": "s",
    "/v1/constraints": "k",
    "/tokenize": "o",
    "/detokenize": "e",
}
_SIZES = {30: "GiB", 20: "MiB", 10: "KiB"}


def table(head: str, rows: Iterable[str]) -> str:
    """A table of Markdown."""
    return "\n".join([f"| {head} |", "|" + "---|" * (head.count("|") + 1), *rows, ""])


def default(value: Value) -> str:
    """A default as people read it."""
    if value.name.endswith("bytes") and isinstance(value.default, int) and value.default:
        bits = next(bits for bits in _SIZES if value.default >> bits << bits == value.default)
        return f"{value.default >> bits} {_SIZES[bits]}"
    if isinstance(value.default, str | tuple) and not value.default and not value.shown:
        return "none"
    if isinstance(value.default, int | float) and not isinstance(value.default, bool) and value.default >= 100_000:
        return f"{value.default:,}"
    shown = value.default_words or "required"
    return f"`{value.default}`" if isinstance(value.default, str) and not value.shown else shown


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def of(known: dict[str, Value]) -> list[str]:
    """A line for each value."""
    return [
        row(f"`{name}`", default(v), v.range.words if v.range else "", v.meaning.replace("``", "`"))
        for name, v in known.items()
    ]


def policies() -> str:
    """Numbers of all policies."""
    rows = []
    for kind in KINDS:
        for name in (n for n in policy_names(kind) if n in CLASSES):
            rows += [f"| `{name}` {line}" for line in of(values(CLASSES[name]))]
    return table("policy | number | default | range | meaning", rows)


def settings(section: str) -> Callable[[], str]:
    """Keys of one table of the configuration."""
    return lambda: table("key | default | range | meaning", of(values(SECTIONS[section])))


def shown() -> str:
    """Panels of the dashboard."""
    return table("row | panel | what it shows", (row(p.row, p.title, p.description) for p in panels()))


def bodies() -> str:
    """Fields of bodies over HTTP: a line for each name and meaning, with the APIs that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for path, fields in BODIES.items():
        for name, one in fields.items():
            meaning = ("required: " if one.required else "") + one.meaning
            found.setdefault((name, meaning), []).append(APIS[path])
    lines = (row(f"`{name}`", " ".join(of), meaning) for (name, meaning), of in sorted(found.items()))
    return table("field | in | what is accepted, and what it does", lines)


def alarms() -> str:
    """Alerts, and how long what they are about has to last."""
    lines = (
        row(f"`{a['alert']}`", a["labels"]["severity"], a["for"], a["annotations"]["description"]) for a in alerts()
    )
    return table("alert | severity | after | what it means, and what helps", lines)


def of_vllm() -> str:
    """Dashboards of vLLM, and what of them has no metrics here."""
    lines = []
    for name, of in VLLM.items():
        missing = sorted({f"`{metric}`" for metrics in of.values() for metric in unserved(metrics)})
        whole = sum(not unserved(metrics) for metrics in of.values())
        lines.append(row(f"`{name}`", f"{whole} of {len(of)}", ", ".join(missing) or "none"))
    return table("dashboard of vLLM | panels with all they ask for | metrics that are not served", lines)


TABLES: dict[str, Callable[[], str]] = {
    "policies": policies,
    "request": lambda: table(
        "option | default | range | meaning", of({name: v for name, v in REQUEST.items() if name != "overload"})
    ),
    "memory": lambda: table("field | default | range | meaning", of(values(Memory))),
    "frames": lambda: table("option | default | range | meaning", of(values(FrameSampling))),
    "video_sampling": lambda: table("field | default | range | meaning", of(values(VideoSampling))),
    **{section: settings(section) for section in SECTIONS},
    "slo": lambda: table("key | default | range | meaning", of(values(SLO))),
    "tenants": lambda: table("key | default | range | meaning", of(values(TenantConfig))),
    "bodies": bodies,
    "dashboard": shown,
    "alerts": alarms,
    "vllm_dashboards": of_vllm,
    "models": lambda: table("key | default | range | meaning", of(values(ModelConfig))),
}


def written(text: str) -> str:
    """``text`` of a page with its tables as they must be."""
    return _MARK.sub(lambda found: found["mark"] + TABLES[found["name"]](), text)


def _range(value: Value) -> str:
    """What of a range somebody must know who writes a configuration."""
    words = (value.range.words if value.range else "").partition(" and at most")[0]
    if meant := re.fullmatch(r"at least \d+ \((.*)\)", words):
        return f"; {meant[1]}"
    return f"; {words}" if words and not words.startswith("at least") else ""


def _lines(known: dict[str, Value], prefix: str = "") -> list[str]:
    lines = []
    for v in known.values():
        shown = json.dumps(list(v.default) if isinstance(v.default, tuple) else v.default)
        lines.append(f"{prefix}{v.name} = {shown}  # {v.meaning}{_range(v)}")
    return lines


def sample() -> str:
    """The sample configuration: every key with its default."""
    lines = ["# Every key of the configuration with its default. Run: mmserve serve --config deploy/mmserve.toml"]
    for name, section in SECTIONS.items():
        lines += ["", f"[{name}]", *_lines(values(section))]
    lines += [
        "",
        "# Discrete schedulers of diffusers that requests can name as their commit policy",
        "# (pip install 'mmserve[schedulers]'):",
        "# [schedulers.refine]",
        '# class = "BlockRefinementScheduler"  # or your own class with that interface: "package.module.Class"',
        "# threshold = 0.9  # further keys are arguments of its constructor",
        "",
        "# Service classes that requests may name, with their latency targets (docs/limits.md):",
        "# [slo.interactive]",
        *_lines(values(SLO), "# "),
        "",
        "# Tenants: who may call the server, and how much of it each may use (docs/tenants.md). Tokens and",
        "# certificates are read again on SIGHUP.",
        "# [[tenants]]",
        *_lines(values(TenantConfig), "# "),
        "",
        "[[models]]",
        *_lines(values(ModelConfig)),
    ]
    return "\n".join(lines) + "\n"


def pages() -> list[Path]:
    """The pages of the documentation."""
    return sorted((ROOT / "docs").glob("*.md"))


if __name__ == "__main__":
    for page in pages():
        page.write_text(written(page.read_text()))
    SAMPLE.write_text(sample())
