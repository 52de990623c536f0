"""Traces cost nothing until somebody asks for them: not an import, and hardly an instruction."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from mmserve.core.request import Request
from mmserve.observe import traces
from mmserve.observe.calls import Call
from mmserve.transfer.local import LocalTransport

PACKAGE = Path(__file__).parents[2] / "mmserve"
#: The one module that imports OpenTelemetry, and may be imported only by those that trace.
SPANS = PACKAGE / "observe" / "spans.py"


def imported_at_once(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself, not within a function or for type checkers; those of a
    file that names neither OpenTelemetry nor its spans are left out."""
    found, source = set[str](), path.read_text()
    if "opentelemetry" not in source and "spans" not in source:
        return found  # none of those that are looked for
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_only_who_traces_imports_opentelemetry() -> None:
    assert any(name.startswith("opentelemetry") for name in imported_at_once(SPANS)), "else nothing is checked"
    offences = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != SPANS
        for name in imported_at_once(path)
        if name.startswith(("opentelemetry", "mmserve.observe.spans"))
    ]
    assert offences == []


def test_without_traces_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, mmserve.client, mmserve.observe.watch\nfrom mmserve.observe import calls, traces\n"
        "traces.configure()()\n"
        "assert traces.begin(calls.current()) is None\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'opentelemetry'])\n"
    )
    clean = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=clean)
    assert done.stdout == "[]\n", done.stderr


def test_what_is_asked_for_a_trace_gets_nothing() -> None:
    transport, request = LocalTransport(), Request(id="a", model="m", messages=())
    assert traces._recorder is None
    assert traces.begin(Call("/a")) is None
    assert traces.context_headers([("traceparent", "00-1-2-01")]) == {}
    assert traces.observed(transport, "decode") is transport
    with traces.stage_pass("encode", [request]):
        pass
