"""A server of one process needs nothing that only Linux has; one of several processes refuses to start without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

FOLDER = Path(__file__).parent.parent / "other_systems"


def elsewhere(*arguments: str) -> CompletedProcess[str]:
    """``mmserve`` with ``arguments``, without what only Linux has."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    called = [sys.executable, "-m", "mmserve", *arguments]
    return subprocess.run(called, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path})


def test_pictures_are_decoded_asked_about_and_answered_in_json() -> None:
    done = elsewhere("demo", "--json", "--items", "5")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["accuracy"] == 1.0 and len(found["items"]) == 5
    assert "json" in {item["task"] for item in found["items"]}, "a constraint is searched, too"


def test_a_cluster_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[workers]]\nroles = "epd"\n')
    done = elsewhere("serve", "--cluster", str(file))
    assert done.returncode == 1
    assert "needs Linux" in done.stderr and "Traceback" not in done.stderr
