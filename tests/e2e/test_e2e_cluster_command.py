"""``mmserve serve --cluster`` as a process of its own: HTTP, the loss of its Ray cluster's head, and a missing package.

Tests of what else the command serves share the server of ``test_e2e_cluster_sessions``."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import pytest
from e2e_helpers import Process, serving, wait_for
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers import picture
from test_e2e_http import free_port

from mmserve.client import Client, Event, Finished, Snapshot

pytestmark = [pytest.mark.timeout(300)]

#: Seconds: a Ray cluster starts slowly on a busy machine.
PATIENCE = 120.0
CLUSTER = '[[workers]]\nroles = "ep"\n[[workers]]\nroles = "d"\n'
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    with serving(tmp_path, "--cluster", str(file), "--set", "engine.torch_threads=1") as found:
        yield found


@pytest.mark.slow
def test_tokens_of_prompts_are_those_of_the_workers(tmp_path: Path) -> None:
    """The front has no tokenizer."""
    file, port = tmp_path / "cluster.toml", free_port()
    file.write_text('[[workers]]\nroles = "epd"\n')
    more = ("--cluster", str(file), "--http", str(port), "--set", "engine.torch_threads=1")

    def asked(path: str, **body: Any) -> dict[str, Any]:
        data = json.dumps({"model": "bundled", **body}).encode()
        request = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    image = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(1)).decode()}
    texts: list[dict[str, Any]] = [{"type": "text", "text": "How many shapes are there?"}]
    with serving(tmp_path, *more) as found:
        for parts in (texts, [{"type": "image", "source": image}, *texts]):
            chat = [{"role": "user", "content": parts}]
            counted = asked("/v1/messages/count_tokens", messages=chat)["input_tokens"]
            usage = asked("/v1/messages", messages=chat, max_tokens=8)["usage"]
            assert counted == usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0) > 0
        chat = [{"role": "user", "content": texts}]
        tokens = asked("/tokenize", messages=chat, return_token_strs=True)
        ids = asked("/v1/chat/completions", messages=chat, max_tokens=8, return_token_ids=True)["prompt_token_ids"]
        assert tokens["tokens"] == ids and tokens["count"] == len(tokens["token_strs"]) == len(ids)
        assert asked("/detokenize", tokens=ids)["prompt"].count(texts[0]["text"]) == 1
        found.process.terminate()


def test_without_ray_the_command_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    program = "import sys; sys.modules['ray'] = None; from mmserve.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", program, "serve", "--cluster", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 1
    assert ended.stderr == "mmserve serve: stages on a cluster need Ray: pip install 'mmserve[ray]'\n"


@pytest.mark.slow
def test_the_loss_of_ray_s_head_is_reported_and_outlived(server: Process) -> None:
    long = {"max_new_tokens": 400, "block_length": 8, "steps": 400, "commit": "low_confidence", "temperature": 50.0}
    with Client(server.address, timeout=PATIENCE) as client:
        assert health(server.address) == SERVING
        events = client.stream("Go on and on.", seed=3, snapshots=True, **long)  # type: ignore[arg-type]
        seen: list[Event] = [next(event for event in events if isinstance(event, Snapshot))]
        os.kill(_head(server.process.pid), signal.SIGKILL)
        wait_for("health to change", lambda: health(server.address) == NOT_SERVING)
        assert not client.generate("And now?", max_new_tokens=8).warnings
        seen += events
        assert isinstance(seen[-1], Finished)
    assert "Ray's head at" in server.stderr() and "does not answer" in server.stderr()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0, server.stderr()


def _head(pid: int) -> int:
    """The process of Ray's control store that process ``pid`` has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and "gcs_server" in (folder / "cmdline").read_text():
                return int(folder.name)
        except FileNotFoundError:
            continue
    raise AssertionError("there is no control store")
