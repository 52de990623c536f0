"""Speed of each attention and cache op on this machine, compared with other implementations: ``mmserve bench kernels``.

On a GPU these are the Triton kernels; on a CPU the PyTorch code used there, which does not predict GPU speed.
"""

from __future__ import annotations

import argparse

import torch
from mmserve_kernels.bench import OPS
from mmserve_kernels.bench.harness import Device, figures, kept, surroundings

from mmserve.bench.measures import Figures, Progress
from mmserve.bench.settings import named_tasks
from mmserve.errors import ConfigError


@torch.inference_mode()
def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each op and shape, of ``--limit`` rounds; without times if a result is wrong. ``--csv`` writes them
    too."""
    ops = named_tasks(arguments, OPS)
    if arguments.limit < 2:
        raise ConfigError("`bench kernels` gives quartiles: --limit must be at least 2 rounds")
    torch.set_num_threads(1)  # CPU time is measured for one thread
    gpu = torch.cuda.is_available()
    on = Device.measured(torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32)
    around = surroundings(on)
    rows = list(kept(figures(ops, on, arguments.limit, progress), arguments.csv, around))
    return {"rows": rows, "settings": {"rounds": arguments.limit, **around}}
