"""Type checkers in strict mode accept the programs of the documentation and the samples, and infer what they should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/client.md", "docs/constraints.md", "docs/policies.md", "docs/tuning.md")

INFERRED = """
from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict

from pydantic import BaseModel, TypeAdapter

from mmserve.client import AsyncClient, Client, Options, Result


class Scene(BaseModel):
    count: int


class Movie(TypedDict):
    title: str


@dataclasses.dataclass
class Point:
    x: int


class Pair(NamedTuple):
    a: str


class Color(Enum):
    RED = "red"


def ask(client: Client, options: Options) -> None:
    scene: Result[Scene] = client.generate("x", schema=Scene, **options)
    title: str = client.generate("x", schema=Movie).parsed["title"]
    x: int = client.generate("x", schema=Point).parsed.x
    a: str = client.generate("x", schema=Pair).parsed.a
    color: Color = client.generate("x", schema=Color).parsed
    numbers: list[int] = client.generate("x", schema=list[int]).parsed
    table: dict[int, Color] = client.generate("x", schema=TypeAdapter(dict[int, Color])).parsed
    mapping: Result[Any] = client.generate("x", schema={"type": "integer"})
    text: Result[Any] = client.generate("x", schema='{"type": "integer"}')
    none: Result[None] = client.generate("x", **options)
    bare: Result = client.generate("x", schema=Literal["a"])
    counts = [sample.parsed.count + 1 for sample in scene.samples]
    print(title, x, a, color, numbers, table, mapping, text, none, bare, counts)


async def later(client: AsyncClient) -> Scene:
    return (await client.generate("x", schema=Scene, temperature=0.5)).parsed
"""
WRONG = """
from mmserve.client import Client

client = Client()
client.generate("x", temprature=1.0)
client.generate("x", temperature="hot")
client.generate("x", commit="sometimes")
client.generate("x", schema=list[int]).parsed.title
"""
#: Lines of it that have an error.
MISTAKES = {5, 6, 7, 8}
#: Libraries that the server is made of and no program imports: mypy takes half a minute to read them.
UNREAD = ("torch", "transformers", "triton", "huggingface_hub", "matplotlib")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of each document, the samples, and a program with mistakes.

    A block of a document that imports no client continues the program before it.
    """
    folder = tmp_path_factory.mktemp("programs")
    for document in DOCUMENTS:
        found: list[str] = []
        for block in re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL):
            if re.search(r"^from mmserve.client import .*\bClient\b", block, re.MULTILINE):
                found.append(block)
            else:
                found[-1] += f"\n\n{block}"
        assert found
        for number, program in enumerate(found):
            (folder / f"{Path(document).stem.lower()}_{number}.py").write_text(program)
    for sample in (ROOT / "samples").glob("*.py"):
        (folder / sample.name).write_text(sample.read_text())
    (folder / "inferred.py").write_text(INFERRED)
    (folder / "wrong.py").write_text(WRONG)
    return folder


def test_mypy_strict_accepts_the_programs_and_refuses_mistakes(programs: Path) -> None:
    imported = "|".join(UNREAD)
    for program in programs.glob("*.py"):
        assert not re.search(rf"^\s*(from|import) ({imported})\b", program.read_text(), re.MULTILINE), program
    unread = ",".join(f"{name}.*" for name in UNREAD)
    (programs / "mypy.ini").write_text(f"[mypy]\n[mypy-{unread}]\nfollow_imports = skip\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=mypy.ini", "--cache-dir=cache", "."],
        cwd=programs,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in errors if not line.startswith("wrong.py")], done.stdout + done.stderr
    assert {int(line.split(":")[1]) for line in errors} == MISTAKES, done.stdout + done.stderr


@pytest.mark.slow
def test_pyright_strict_accepts_the_programs_and_refuses_mistakes(programs: Path) -> None:
    """Run with ``pip install basedpyright``, whose engine is pyright's, and ``pytest -m slow tests/e2e``."""
    pytest.importorskip("basedpyright", reason="needs basedpyright")
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["*.py"]}
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "-p", ".", "--pythonpath", sys.executable, "--outputjson"],
        cwd=programs,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert not [each for each in errors if not each["file"].endswith("wrong.py")], errors
    assert {each["range"]["start"]["line"] + 1 for each in errors} == MISTAKES, errors
