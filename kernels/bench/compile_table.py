"""Registers, shared memory and spills of every kernel variant on every target, compiled without a GPU.

``python kernels/bench/compile_table.py`` prints a table in Markdown; with ``--json`` one JSON object a line. Exit code
1 if a variant spills registers or needs more shared memory than the target has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is first imported

from mmserve_kernels.aot import TARGETS, Target, Variant, compile_for
from mmserve_kernels.dispatch import OPS


def rows(only: str | None = None, *, one: bool = False) -> Iterator[dict[str, object]]:
    """One record a variant and target; ``fits``: nothing is spilled and shared memory suffices.

    ``only``: restrict to one op; ``one``: only the first variant of each op for each target.
    """
    for package in dict.fromkeys(op.package for name, op in OPS.items() if only in (None, name)):
        variants = list(import_module(f"{package}.kernel").variants())
        for target in TARGETS:
            fitting = [v for v in variants if v.backend in (None, target.gpu.backend, target.name)]
            for variant in fitting[:1] if one else fitting:
                yield _row(package.rpartition(".")[2], variant, target)


def _row(op: str, variant: Variant, target: Target) -> dict[str, object]:
    used = compile_for(variant, target)
    fits = used.shared <= target.shared_limit and not used.spilled
    settings = {"warps": variant.num_warps, "stages": variant.num_stages}
    return {"op": op, "variant": variant.name, "target": target.name, **settings, **asdict(used), "fits": fits}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", choices=sorted(OPS), help="only this one")
    parser.add_argument("--one", action="store_true", help="only the first variant of each op for each target")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    fits = True
    for i, row in enumerate(rows(arguments.op, one=arguments.one)):
        fits &= bool(row["fits"])
        if arguments.json:
            print(json.dumps(row), flush=True)
            continue
        if not i:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
