"""``[engine]``: sizes and budgets of one model's engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mmserve.core.values import SHARE_ABOVE_0, Range, at_least, one_of, value
from mmserve.cores import available_cores
from mmserve.errors import ConfigError

#: Values of ``sparse_prefill`` and ``sparse_decode``: names in ``kv/sparse.py``, which is not imported because of
#: torch.
SPARSE_PREFILL = ("", "vertical_slash", "query_aware", "segments", "sink_window", "random", "oracle")
SPARSE_DECODE = ("", "quest", "double_sparse", "tidal", "sink_window", "random", "oracle")
_COUNT, _AUTO = at_least(1), at_least(0, meaning="auto")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and budgets of one model's engine. Token budgets are rows of a forward pass."""

    stages: str = value(
        "threads",
        one_of("threads", "inline", words="'threads' or 'inline'"),
        "one thread for each stage, or one thread for all stages",
    )
    torch_threads: int = value(
        0,
        at_least(0, meaning="auto", most=1024),
        "threads of torch for each stage; auto = the cores divided by the number of stage threads",
    )
    max_queued: int = value(256, _COUNT, "samples waiting to start; one more is refused with RESOURCE_EXHAUSTED")
    max_wait_seconds: float = value(
        60.0, at_least(0, meaning="no limit"), "a request whose expected wait is longer is refused"
    )
    max_samples: int = value(16, _COUNT, "samples of one request, and of all prompts of a completion together")
    max_running: int = value(64, _COUNT, "requests that hold K/V pages at once")
    max_pending_per_stage: int = value(8, _COUNT, "requests that may wait between two stages")
    page_size: int = value(16, _COUNT, "token positions in a K/V page")
    pages: int = value(0, _AUTO, "K/V pages; auto = as many as max_running requests of max_tokens need")
    max_tokens: int = value(
        0, _AUTO, "prompt and generated tokens of one request; auto = the model's maximum, or what the K/V pages hold"
    )
    kv_share: float = value(
        0.5, SHARE_ABOVE_0, "with pages = 0: share of the free memory that the K/V pages of a model may take"
    )
    encode_batch: int = value(8, _COUNT, "images and frames of videos encoded together")
    prefill_tokens: int = value(
        0,
        _AUTO,
        "rows of a prefill batch; longer prompts of autoregressive and block-diffusion models are split into chunks",
    )
    decode_tokens: int = value(0, _AUTO, "rows of a decode batch; a request with more rows in a step runs alone")
    cuda_graphs: str = value(
        "auto",
        one_of("auto", "off", words="'auto' or 'off'"),
        "auto = decode steps run as CUDA graphs on a CUDA device, where the model supports it",
    )
    prefix_cache: bool = value(
        True, meaning="prompts with a common beginning share K/V pages, where attention makes that exact"
    )
    adapter_folder: str = value(
        "", meaning="folder of adapters (LoRA) that can be loaded at run time (ModelService); empty = none"
    )
    adapter_bytes: int = value(
        256 << 20, at_least(0), "weights of a model's adapters; their copies for recent batches may take as much again"
    )
    sparse_prefill: str = value(
        "", one_of(*SPARSE_PREFILL), "sparse attention in prefill: how blocks are chosen; empty = dense attention"
    )
    sparse_decode: str = value(
        "", one_of(*SPARSE_DECODE), "sparse attention in decode: how pages are chosen; empty = dense attention"
    )
    sparse_density: float = value(1.0, SHARE_ABOVE_0, "with sparse attention: largest share of the blocks that is read")
    sparse_mass: float = value(
        1.0,
        SHARE_ABOVE_0,
        "with sparse attention: read the fewest blocks that hold this share of the estimated attention",
    )
    sparse_block: int = value(
        64, meaning="rows (and in prefill, positions) of a block of sparse attention; a power of two, at least 16"
    )
    kv_bits: int = value(
        0,
        one_of(8, 4, 0, words="8, 4 or 0 for the model's own precision"),
        "bits of a stored key or value",
    )
    kv_kept: float = value(
        0.0,
        Range("at least 0 and below 1", lambda share: 0 <= share < 1),
        "with kv_bits: share of each page's tokens, those with the smallest key norms, kept at full precision",
    )


#: Rows of a prefill and of a decode batch, on a CPU, where the time of a pass is nearly proportional to its rows, and
#: on accelerators, where few rows take as long as many.
_CPU_ROWS, _ACCELERATOR_ROWS = (256, 256), (2048, 4096)


#: ``max_tokens`` without a model.
_POSITIONS = 1024


def resolve(
    engine: EngineConfig,
    *,
    cores: int | None = None,
    device: str = "cpu",
    positions: int = _POSITIONS,
    room: int | None = None,
) -> EngineConfig:
    """Replace every "auto" of ``engine`` by a number; the engine gets only resolved values.

    ``device``: type of the model's device; ``positions``: the model's maximum; ``room``: number of pages that fit in
    memory (None = unlimited). Stages × torch threads stays within ``cores`` if possible: waiting threads of an OpenMP
    pool spin, and two pools on the same cores were measured four times slower than one thread each.
    """
    cores = cores or available_cores()
    busy = 1 if engine.stages == "inline" else 3
    pages_each = -(-(engine.max_tokens or positions) // engine.page_size)
    pages = engine.pages or engine.max_running * pages_each
    if room is not None and not engine.pages:
        pages = max(1, min(pages, room))
    prefill, decode = _CPU_ROWS if device == "cpu" else _ACCELERATOR_ROWS
    return dataclasses.replace(
        engine,
        torch_threads=engine.torch_threads or max(1, cores // busy),
        pages=pages,
        max_tokens=engine.max_tokens or min(positions, pages * engine.page_size),
        prefill_tokens=engine.prefill_tokens or prefill,
        decode_tokens=engine.decode_tokens or decode,
    )


def check_pages(engine: EngineConfig, max_tokens: int) -> None:
    """Raises ``ConfigError`` if all pages of ``engine``, which is resolved, hold less than ``max_tokens`` tokens."""
    if (room := engine.pages * engine.page_size) < max_tokens:
        raise ConfigError(
            f"[engine] pages × page_size is {room}, less than one request of max_tokens {max_tokens} needs"
        )


def check_engine(engine: EngineConfig, where: str) -> None:
    """Raises ``ConfigError`` for conflicting settings."""
    for key, used in (("sparse_block", engine.sparse_prefill), ("page_size", engine.sparse_decode)):
        size = getattr(engine, key)
        if used and (size < 16 or size & (size - 1)):
            raise ConfigError(
                f"{where} {key} must be a power of two of at least 16 where attention is sparse, not {size}"
            )
    if engine.kv_bits and (engine.sparse_prefill or engine.sparse_decode):
        raise ConfigError(f"{where} sparse attention reads K/V at full precision: set kv_bits = 0, or sparse_* = ''")
