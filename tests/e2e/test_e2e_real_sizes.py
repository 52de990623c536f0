"""Checkpoints of real dimensions, one at a time: loaded by a server of their own, which answers about a picture.

They take 3 to 7 GB of disk and of memory each, and minutes: ``pytest -m slow -s tests/e2e/test_e2e_real_sizes.py``
prints what was measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import picture
from real_sizes import llada_v, llava_15, qwen25_vl

#: Most memory that a server may have taken beside what its imports take, as a share of the weights' bytes.
MOST = 1.3
#: What the server's process runs: it says how much memory its own data took at most, with imports and without.
CHILD = """
import json, sys, threading
from pathlib import Path
from mmserve.assembly import BackgroundServer
from mmserve.client import Client
from mmserve.config import Config, EngineConfig, ModelConfig

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {l.split(":")[0]: int(l.split()[1]) * 1024 for l in lines if l.startswith(("RssAnon", "VmHWM"))}

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous()["RssAnon"])

before = anonymous()["RssAnon"]
threading.Thread(target=watch, daemon=True).start()
model = ModelConfig(path=sys.argv[1], dtype="bfloat16", device="cpu")
config = Config(models=(model,), engine=EngineConfig(max_running=1, max_tokens=2048))
with BackgroundServer(config) as server, Client(server.address, timeout=600) as client:
    client.wait_ready()
    result = client.generate("What is it?", images=[Path(sys.argv[2])], max_new_tokens=4)
done.set()
print(json.dumps({
    "before": before, "peak": peak, "resident": anonymous()["VmHWM"], "tokens": result.usage.completion_tokens,
    "visual": result.usage.visual_tokens,
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("write", "visual"), [(llava_15, 576), (llada_v, 1836), (qwen25_vl, 216)])
def test_checkpoints_of_real_dimensions(tmp_path: Path, write: Callable[[Path], int], visual: int) -> None:
    weights = write(tmp_path / "model")
    (tmp_path / "picture.png").write_bytes(picture(1, (500, 336)))
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "model"), str(tmp_path / "picture.png")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    share = (found["peak"] - found["before"]) / weights
    print(f"\n{write.__name__}: {weights / 1e9:.2f} GB of weights, {share:.2f} times as much at most; {found}")
    assert found["visual"] == visual and 0 < found["tokens"] <= 4
    assert share <= MOST, "loading keeps more than one tensor twice"
