"""``python -m mmserve_kernels.bench [OP …]``: a line of JSON for each case, on a GPU if there is one.

``mmserve bench kernels`` prints the same results; this command has no dependencies beyond those of the kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from mmserve_kernels.bench import OPS
from mmserve_kernels.bench.harness import Device, figures, kept, surroundings


def main() -> int:
    """Measure and print; returns 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"any of {', '.join(OPS)} (default all)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--commit", help="of the source tree, where that has no history of its own with it")
    arguments = parser.parse_args()
    if unknown := set(arguments.ops) - set(OPS):
        parser.error(f"no op is called {min(unknown)!r}; there are {', '.join(OPS)}")
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    right = True
    with torch.inference_mode():
        on = Device.measured(torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32)
        around = surroundings(on)
        around["commit"] = around["commit"] or arguments.commit or ""
        print(json.dumps(around))
        rows = figures(arguments.ops or OPS, on, arguments.rounds, lambda text: print(text, file=sys.stderr))
        for row in kept(rows, arguments.csv, around):
            right &= bool(row["right"])
            print(json.dumps(row), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
