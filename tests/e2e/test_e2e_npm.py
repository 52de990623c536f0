"""The official npm client of OpenAI, unchanged, over a real socket."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e_helpers import EMPTY, Running, running, settings, wait_for
from test_e2e_http import free_port

from mmserve.config import ModelConfig
from mmserve.reference.tasks import sample

PROGRAM = Path(__file__).parent / "node" / "openai_client.mjs"
#: The package is fetched: seconds, on a slow line.
PATIENCE = 100


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the program that uses it."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai@6"]
    try:
        got = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not fetch the package openai within {PATIENCE} s")
    if got.returncode:
        pytest.skip(f"npm cannot fetch the package openai: {got.stderr[-300:]}")
    shutil.copy(PROGRAM, folder)
    return folder


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    config = settings(server={"http_port": free_port()})
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    with running(replace(config, models=models)) as found:
        yield found
        found.assert_serves()


@pytest.mark.timeout(3 * PATIENCE)
def test_the_client_of_npm(package: Path, served: Running) -> None:
    picture, _question = sample("count", random.Random(3))
    (package / "scene.png").write_bytes(picture.png())
    url = f"http://127.0.0.1:{served.background.config.server.http_port}"
    command = ["node", PROGRAM.name, url, "scene.png"]
    ran = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    expected = served.client.generate("How many shapes are there?", max_new_tokens=16)
    assert found["models"] == [
        "bundled",
        "bundled:decisions",
        "bundled:streams",
        "bundled:tools",
        "bundled-causal",
        "bundled-causal:decisions",
        "bundled-causal:tools",
    ]
    assert found["chat"]["text"] == found["stream"]["text"] == found["runner"] == expected.text
    assert found["chat"]["usage"] == found["stream"]["usage"]
    assert found["chat"]["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert found["chat"]["reason"] == "stop" and set(found["alternatives"]) == {2}
    of_picture = served.client.generate("How many shapes are there?", images=[picture.png()], max_new_tokens=16)
    assert found["vision"] == {"text": of_picture.text, "prompt": of_picture.usage.prompt_tokens}
    for scene in (found["parsed"], found["response"]):
        assert scene["colour"] in ("red", "blue") and 0 <= scene["count"] <= 9
    assert (found["events"][0], found["events"][-1]) == ("response.created", "response.completed")
    assert found["call"]["name"] == "get_weather" and found["call"]["reason"] == "tool_calls"
    assert found["call"]["arguments"]["city"] in ("Oslo", "Rome")
    assert isinstance(found["told"], str)
    assert found["error"]["name"] == "BadRequestError" and found["error"]["param"] == "temperature"
    assert found["error"]["status"] == 400 and found["error"]["label"]
    assert found["aborted"]
    wait_for("the answer that was left to be dropped", lambda: served.engine.stats() == EMPTY)
