"""What is compiled once for a new copy of the sources: each part by one of the suite's processes instead of by all.

Of the processes that pytest-xdist starts, the first compiles the kernels' loops, which takes ten seconds; the others
share the tests, whose assertions pytest rewrites.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "kernels" / "mmserve_kernels"
#: Seconds for which the other processes wait for the first.
PATIENCE = 120.0


def compile_share(config: pytest.Config) -> None:
    """Compile this process's part; all of it was compiled on return."""
    worker = getattr(config, "workerinput", None)
    if worker is None or worker["workercount"] < 2 or not config.option.basetemp:
        return
    index, others = int(worker["workerid"].removeprefix("gw")), worker["workercount"] - 1
    compiled = Path(config.option.basetemp).parent / "loops-compiled"
    if index == 0:
        try:
            import mmserve_kernels.elementwise
            import mmserve_kernels.layer_rows  # noqa: F401 - with all others that models use
        finally:
            compiled.touch()
        return
    new = not any(KERNELS.rglob("*.nbi"))
    for path in sorted(TESTS.rglob("test_*.py"))[index - 1 :: others]:
        with suppress(ImportError, AttributeError, TypeError):  # of another version of pytest, which rewrites it later
            _rewrite(path, config)
    end = time.monotonic() + PATIENCE
    while new and not compiled.exists() and time.monotonic() < end:
        time.sleep(0.05)


def _rewrite(path: Path, config: pytest.Config) -> None:
    """As pytest does when it imports a test."""
    from _pytest.assertion import rewrite

    cached = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, cached) is None and rewrite.try_makedirs(cached.parent):
        source, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, cached)
