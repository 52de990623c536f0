"""Templates over gRPC on the bundled models."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import Running, command_here

from mmserve.client import Delta, Finished, Hole, Snapshot
from mmserve.errors import InvalidArgument
from mmserve.reference.scenes import KINDS, draw_scene

FORM = ["shape: ", Hole(choices=KINDS, max_tokens=2), "; where: ", Hole(regex="[a-z ]{3,20}", max_tokens=8), "."]


def test_a_form_is_filled_in(server: Running) -> None:
    """Streamed and at once, alone and among others, with every text in its place from the first event on."""
    scene = draw_scene(random.Random(5))
    asked: dict[str, Any] = {"images": [scene.png()], "template": FORM, "max_new_tokens": 32, "timeout": 100.0}
    events = list(server.client.stream("What is in the picture?", snapshots=True, **asked))
    done = events[-1]
    assert isinstance(done, Finished)
    assert done.text == f"shape: {done.holes[0]}; where: {done.holes[1]}."
    assert done.holes[0] in KINDS and re.fullmatch("[a-z ]{3,20}", done.holes[1])
    assert "".join(event.text for event in events if isinstance(event, Delta)) == done.text
    shown = [event.text for event in events if isinstance(event, Snapshot)]
    assert shown and all(re.fullmatch("shape: .*; where: .*[.]", text) for text in shown)
    others = [server.start(server.client.generate, "Describe the scene.", max_new_tokens=8) for _ in range(3)]
    again = server.client.generate("What is in the picture?", **asked)
    assert (again.text, again.holes, again.forwards) == (done.text, done.holes, done.forwards)
    assert all(other.result().holes == () for other in others)


def test_a_template_that_does_not_fit_is_refused(server: Running) -> None:
    with pytest.raises(InvalidArgument, match="at least") as refused:
        server.client.generate("x", template=FORM, max_new_tokens=8)
    assert [violation.field for violation in refused.value.violations] == ["sampling.max_new_tokens"]


def test_the_command_line_reads_a_template(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "form.json"
    path.write_text(json.dumps(["shape: ", {"choices": ["circle", "square"], "max_tokens": 2}]))
    done = command_here("generate", "x", "--server", server.address, "--template", str(path), "--json")
    assert json.loads(done.stdout)["holes"][0] in ("circle", "square")
