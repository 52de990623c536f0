"""What the README and the samples show runs as it stands there."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_helpers import Running

from mmserve.reference.clips import draw_clip, h264
from mmserve.reference.scenes import draw_scene

ROOT = Path(__file__).parents[2]
#: Those about video have tests of their own: ``test_e2e_video_samples.py``.
VIDEO_SAMPLES = {"alerts.py", "camera_qa.py", "video_qa.py"}
PICTURE_SAMPLES = sorted({path.name for path in (ROOT / "samples").glob("*.py")} - VIDEO_SAMPLES)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_readmes_blocks_are_one_program(server: Running, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    program = "\n".join(blocks).replace("localhost:50051", server.address)
    assert len(blocks) == 3 and server.address in program
    draw_scene(random.Random(7)).picture.save(tmp_path / "001-count-1.png")
    (tmp_path / "film.mp4").write_bytes(h264(draw_clip(random.Random(7)).frames()))
    (tmp_path / "shown.py").write_text(program, encoding="utf-8")
    done = run(tmp_path, "shown.py")
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert told[0] and any("▒" in line for line in told)
    assert told[-2].startswith("[Shape(color=")
    assert told[-1]


@pytest.mark.slow  # a minute: pytest -m slow tests/e2e/test_e2e_readme.py
@pytest.mark.parametrize("sample", PICTURE_SAMPLES)
def test_samples_run(server: Running, tmp_path: Path, sample: str) -> None:
    first = ["out.gif"] if sample == "watch_the_canvas.py" else []
    done = run(tmp_path, str(ROOT / "samples" / sample), *first, server.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout
