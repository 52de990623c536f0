"""What is installed: the client needs no torch, and the distributions hold what they should."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "packaging" / "client"
#: Packages that only the server may import.
SERVER_ONLY = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "av", "llguidance", "jinja2")

#: Prints the files of mmserve that its client imports, in a process where nothing of the server can be imported.
IMPORTS = """
import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # an import of it raises ImportError
import mmserve.client
modules = [m for n, m in sys.modules.items() if n.split(".")[0] == "mmserve"]
print(json.dumps([m.__file__ for m in modules]))
"""


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def names(requirements: list[str]) -> dict[str, str]:
    """Requirements by the name of their package."""
    found = {}
    for requirement in requirements:
        bare = requirement.partition(";")[0].strip()
        name = bare.split(">")[0].split("=")[0].split("<")[0]
        found[name] = bare
    return found


def test_the_client_imports_nothing_of_the_server_and_its_distribution_holds_what_it_imports() -> None:
    told = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps(SERVER_ONLY)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert told.returncode == 0, told.stderr
    imported = {str(Path(file).relative_to(ROOT)) for file in json.loads(told.stdout)}
    assert "mmserve/client/__init__.py" in imported
    included = toml(CLIENT / "pyproject.toml")["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert all(source == f"../../{inside}" for source, inside in included.items())
    typed = {"mmserve/py.typed", *(str(p.relative_to(ROOT)) for p in (ROOT / "mmserve" / "v1").glob("*.pyi"))}
    assert set(included.values()) == imported | typed | {"LICENSE"}


def test_both_distributions_agree_on_versions() -> None:
    server, client = (toml(folder / "pyproject.toml")["project"] for folder in (ROOT, CLIENT))
    own = names(server["dependencies"])
    for name, requirement in names(client["dependencies"]).items():
        if name != "typing-extensions":
            assert own[name] == requirement
    assert not set(names(client["dependencies"])) & set(SERVER_ONLY)
    assert server["requires-python"] == client["requires-python"]


def test_the_server_is_distributed_with_its_protos_and_the_sample_configuration() -> None:
    targets = toml(ROOT / "pyproject.toml")["tool"]["hatch"]["build"]["targets"]
    inside = targets["wheel"]["shared-data"]
    assert inside == {"protos": "share/mmserve/protos", "deploy/mmserve.toml": "share/mmserve/mmserve.toml"}
    assert all((ROOT / source).exists() for source in inside)
    assert {"mmserve", "kernels", "protos", "deploy", "packaging", "docs", "tests"} <= set(targets["sdist"]["include"])


@pytest.mark.slow  # builds and installs from a package index: pytest -m slow tests/unit/test_packaging.py
@pytest.mark.timeout(600)
def test_the_client_alone_asks_a_server(tmp_path: Path) -> None:
    from mmserve.assembly import BackgroundServer
    from mmserve.config import Config, ServerConfig

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", str(CLIENT)], check=True, cwd=tmp_path)
    with BackgroundServer(Config(server=ServerConfig(port=0))) as server:
        program = (
            "import sys\nfrom mmserve.client import Client\n"
            "with Client(sys.argv[1]) as client:\n"
            "    print(client.generate('How many?', max_new_tokens=4, timeout=60).forwards)\n"
            "print('torch' in sys.modules)\n"
        )
        asked = [python, "-c", program, server.address]
        done = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    forwards, torch = done.stdout.split()
    assert int(forwards) >= 1 and torch == "False"
    installed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "mmserve-client" in installed and "torch" not in installed and "numpy" not in installed


@pytest.mark.slow  # builds a wheel and an sdist: pytest -m slow tests/unit/test_packaging.py
@pytest.mark.timeout(600)
def test_wheel_and_sdist_hold_what_users_need(tmp_path: Path) -> None:
    import tarfile
    import zipfile

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "build", "hatchling"], check=True)
    build = [python, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel], [sdist] = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert "mmserve/cli/serve.py" in inside
    for shared in ("protos/mmserve/v1/generation.proto", "mmserve.toml"):
        assert any(name.endswith(f".data/data/share/mmserve/{shared}") for name in inside)
    with tarfile.open(sdist) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert {"protos/mmserve/v1/generation.proto", "deploy/mmserve.toml", "packaging/client/pyproject.toml"} <= kept
