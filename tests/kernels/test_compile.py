"""Kernels compile for GPUs that are not here, within their shared memory and without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmserve_kernels.dispatch import OPS

KERNELS = Path(__file__).parents[2] / "kernels"


def compiled(*arguments: str) -> list[dict[str, object]]:
    """Rows of the table, made in a process of its own: this one runs the interpreter."""
    command = [sys.executable, str(KERNELS / "bench" / "compile_table.py"), "--json", *arguments]
    paths = os.pathsep.join([str(KERNELS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_variant_of_each_op_fits_every_target() -> None:
    rows = compiled("--one")
    packages = {op.package.rpartition(".")[2] for op in OPS.values()}
    assert {row["op"] for row in rows} == packages
    assert {row["target"] for row in rows} == {"sm_80", "sm_90", "gfx942"}
    for row in rows:
        assert row["fits"], row
        assert 0 < int(str(row["registers"])) <= 512, row


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("op", OPS)
def test_every_variant_fits_every_target(op: str) -> None:
    assert all(row["fits"] for row in compiled("--op", op))
