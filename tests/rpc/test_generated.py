"""The generated code in the package is what the protos give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    protos = sorted((ROOT / "protos/mmserve/v1").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    # in a process of its own: the compiler's library and those of others do not go together in one
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *map(str, protos)]
    subprocess.run(command, check=True)

    def content(folder: Path) -> dict[str, str]:
        return {file.name: file.read_text() for file in folder.glob("*_pb2*.py*")}

    made, committed = content(tmp_path / "mmserve/v1"), content(ROOT / "mmserve/v1")
    assert len(made) == 3 * len(protos)
    assert made == committed
