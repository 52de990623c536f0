"""Measurement of an op: first its correctness, then its time, compared with other implementations on the same inputs.

Each round runs the op and all alternatives in sequence, so that noise affects all equally. On a GPU the time is device
time, with cold caches and with all launches queued in advance, as in a CUDA graph of a decode step; on a CPU it is the
CPU time of one thread.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

#: Relative and absolute tolerance, for values around 1: a few roundings of the dtype.
TOLERANCES = {torch.float32: (2e-4, 2e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3e-2, 1e-2)}
#: Minimum seconds of a round for each implementation, on a CPU.
_LEAST = 2e-3
#: Bytes written between two runs on a GPU to evict its caches.
_FLUSH = 256 << 20
#: Cycles (about 5 ms) that a GPU is delayed while the host queues a run, so that it does not wait for the host within.
_QUEUING = 10_000_000
#: Seconds of warm-up until a GPU's clocks are stable.
_WARM = 1.0

Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement. ``check`` raises ``AssertionError`` for a wrong result of ``run`` or of an alternative in
    ``beside``.

    ``path``: ``triton`` or ``pytorch``, as chosen by ``pick``. ``bytes``: minimum memory traffic; ``operations``:
    additions and multiplications of matrix products.
    """

    name: str
    path: str
    run: Run
    check: Callable[[Any], None]
    bytes: int
    operations: int = 0
    beside: Mapping[str, Run] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """The device, and its measured peak rates: bytes a second of a copy, operations a second of a product of large
    matrices."""

    device: torch.device
    dtype: torch.dtype
    copy_rate: float
    matrix_rate: float

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> Device:
        """The rates of ``device``, from a copy much larger than its caches and a matrix product in ``dtype``."""
        gpu = device.type == "cuda"
        source = torch.randint(256, ((1 << 30) if gpu else (1 << 26),), dtype=torch.uint8, device=device)
        room = torch.empty_like(source)
        side = 8192 if gpu else 1024
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        begin = time.monotonic()
        while gpu and time.monotonic() < begin + _WARM:
            _seconds(lambda: a @ b, device)
        copying, multiplying = (
            statistics.median(_seconds(run, device) for _ in range(7))
            for run in (lambda: room.copy_(source), lambda: a @ b)
        )
        return cls(device, dtype, 2 * source.nbytes / copying, 2 * side**3 / multiplying)


def assert_near(actual: Tensor, exact: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Assert that ``actual`` equals ``exact`` up to a few roundings of ``dtype``; ``scale``: magnitude of the
    summands."""
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(actual.float(), exact.float(), rtol=relative, atol=absolute * scale)


def measure(op: str, case: Case, on: Device, rounds: int) -> dict[str, Any]:
    """Results of one case: medians and quartiles of ``rounds``, times in microseconds.

    If the result of the op or of an alternative is wrong, the row has the error and no times. ``times_X``: ratio of the
    op's time to X's, in the same round. ``bound``: the limit by the roofline model, ``copy`` (memory traffic)
    or ``matrix`` (products); if the shares of both rates are far below 1, something else limits the op.
    """
    row: dict[str, Any] = {
        "op": op,
        "case": case.name,
        "path": case.path,
        "dtype": str(on.dtype).removeprefix("torch."),
        "right": True,
        "bytes": case.bytes,
        "operations": case.operations,
    }
    if wrong := _wrong(case.run, case.check):
        return row | {"right": False, "wrong": wrong}
    runs = {"": case.run}
    for name, run in case.beside.items():
        if wrong := _wrong(run, case.check):
            row[f"wrong_{name}"] = wrong
        else:
            runs[name] = run
    repeats = {name: _repeats(run, on.device) for name, run in runs.items()}
    times = [{name: _seconds(run, on.device, repeats[name]) for name, run in runs.items()} for _ in range(rounds)]
    seconds = statistics.median(t[""] for t in times)
    row["microseconds"] = _quartiles([t[""] * 1e6 for t in times])
    row["share_of_copy_rate"] = round(case.bytes / seconds / on.copy_rate, 3)
    if case.operations:
        row["share_of_matrix_rate"] = round(case.operations / seconds / on.matrix_rate, 3)
    row["bound"] = "copy" if case.bytes / on.copy_rate >= case.operations / on.matrix_rate else "matrix"
    return row | {f"times_{name}": _quartiles([t[""] / t[name] for t in times]) for name in runs if name}


def figures(ops: Sequence[str], on: Device, rounds: int, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each case of ``ops``, created and measured one after another; if an op's next case cannot be created, a
    row with the error."""
    for op in ops:
        try:
            for case in import_module(f"mmserve_kernels.bench.{op}").cases(on.device, on.dtype):
                progress(f"{op}: {case.name}")
                yield measure(op, case, on, rounds)
                del case  # frees its tensors before the next case
        except Exception as error:  # noqa: BLE001  no memory, or a compiler: the other ops are still measured
            yield {"op": op, "case": "the next one", "right": False, "wrong": _said(error)}


def surroundings(on: Device) -> dict[str, Any]:
    """The environment of the results: device, its measured rates, versions, and the commit if there is one."""
    gpu = on.device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(on.device) if gpu else "none",
        "copy_gb_per_s": round(on.copy_rate / 1e9, 1),
        "matrix_gflop_per_s": round(on.matrix_rate / 1e9, 1),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "cuda": str(torch.version.cuda),
        "commit": _commit(),
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], around: Mapping[str, Any]) -> None:
    """Write one line a row, with ``around`` repeated in each; quartiles become three columns. Creates parent
    folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = [_flat(row) | dict(around) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(flat)


def kept(
    rows: Iterable[Mapping[str, Any]], path: Path | None, around: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield ``rows`` as they come; the rows so far are stored in ``path``, if given, in case the run is interrupted."""
    so_far = []
    for row in rows:
        so_far.append(row)
        if path is not None:
            write_csv(path, so_far, around)
        yield row


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        out |= (
            dict(zip((f"{name}_q1", name, f"{name}_q3"), value, strict=True))
            if isinstance(value, list)
            else {name: value}
        )
    return out


def _wrong(run: Run, check: Callable[[Any], None]) -> str:
    """The error of a wrong result; "" = correct."""
    try:
        check(run())
    except Exception as error:  # noqa: BLE001  compilers have errors of their own, and the others are still measured
        return _said(error)
    return ""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


def _repeats(run: Run, device: torch.device) -> int:
    return 1 if device.type == "cuda" else max(1, round(_LEAST / max(_seconds(run, device), 1e-7)))


def _seconds(run: Run, device: torch.device, repeats: int = 1) -> float:
    if device.type == "cuda":
        return _on_gpu(run, device)
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def _on_gpu(run: Run, device: torch.device) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(_FLUSH, dtype=torch.uint8, device=device).zero_()
    torch.cuda._sleep(_QUEUING)
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def _quartiles(values: list[float]) -> list[float]:
    return [float(f"{x:.4g}") for x in statistics.quantiles(values, n=4)]


def _commit() -> str:
    """The commit of the source tree that this runs from, with ``-dirty`` if files are modified; "" outside a
    repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
