"""Server configuration: frozen dataclasses, read from TOML, resolved once.

A file looks like this (every key has a default)::

    [server]
    port = 50051
    [engine]
    max_queued = 256
    [[models]]
    name = "reference"
    path = "bundled"
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.errors import ConfigError
from mmserve.tenants import TenantConfig, check_tenants, is_loopback, is_token

#: The path that names the diffusion model shipped with the package.
BUNDLED = "bundled"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how the server listens."""

    host: str = "127.0.0.1"
    port: int = 50051  # 0 = any free port
    max_message_bytes: int = 64 << 20  # larger media are uploaded first
    message_seconds: float = 60.0  # how long a message may take to come whole; 0 = as long as it likes
    connection_calls: int = 1024  # calls of a connection at once; 0 = any number
    connection_idle_seconds: float = 600.0  # a connection without calls is closed after these; 0 = never
    connection_age_seconds: float = 0.0  # a connection is closed after these, and its client connects anew; 0 = never
    connection_grace_seconds: float = 0.0  # … its calls may go on for these; 0 = as long as they take
    tls_certificate: str = ""  # PEM file; set with tls_key to serve TLS
    tls_key: str = ""
    tls_client_ca: str = ""  # PEM file; set to require client certificates (mTLS)
    auth_tokens: tuple[str, ...] = field(default=(), repr=False)  # bearer tokens, each a tenant without limits
    allow_plaintext_tokens: bool = False  # tokens without TLS on a host that other machines reach
    drain_seconds: float = 30.0  # how long running requests may go on after SIGTERM
    keepalive_seconds: float = 30.0
    metrics_port: int = 0  # Prometheus metrics over HTTP, or HTTPS where TLS is set; 0 = none
    metrics_host: str = "127.0.0.1"  # whoever reaches it may read them: no token is asked for
    http_port: int = 0  # the HTTP APIs (extra mmserve[http]) on ``host``, with the same TLS and tokens; 0 = none
    http_connections: int = 1024  # open at once; 0 = any number
    access_log: bool = True  # one line of the log a call, health checks that succeed excepted


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and budgets of one model's engine. Budgets in tokens count rows of a forward pass."""

    stages: str = "threads"  # "threads": one worker thread a stage; "inline": all stages on one thread
    torch_threads: int = 0  # 0 = cores shared out so that busy stages do not fight over them
    max_queued: int = 256  # samples waiting to start; one more is refused with RESOURCE_EXHAUSTED
    max_wait_seconds: float = 60.0  # a request that is expected to wait longer to start is refused; 0 = it may wait
    max_samples: int = 16  # of one request
    max_running: int = 64  # requests holding pages at once
    max_pending_per_stage: int = 8  # requests that may wait between two stages
    page_size: int = 16  # token positions a K/V page
    pages: int = 0  # 0 = as many as max_running requests of max_tokens need
    max_tokens: int = 1024  # prompt and generated tokens of one request
    encode_batch: int = 8  # images and frames of videos encoded together
    prefill_tokens: int = 0  # a next-token model's longer prompts are run in chunks of this; 0 = by the device
    decode_tokens: int = 0  # a request with more rows a step runs alone, and shorter ones meanwhile; 0 = by the device
    cuda_graphs: str = "auto"  # "auto": on a CUDA device, decode steps run as graphs where the model can; "off": never
    prefix_cache: bool = True  # prompts that begin alike share K/V pages, where attention makes that exact
    sparse_prefill: str = ""  # how prefill chooses the blocks that rows look at; "" = it looks at everything
    sparse_decode: str = ""  # how decode chooses pages
    sparse_density: float = 1.0  # at most such a share of the blocks …
    sparse_mass: float = 1.0  # … and the fewest that hold such a share of the attention, as far as that is foreseen
    sparse_block: int = 64  # rows of a block, and in prefill positions
    kv_bits: int = 0  # of a key or value as it is stored: 8 or 4; 0 = the model's own precision
    kv_kept: float = (
        0.0  # share of each page's tokens, those of the smallest key norms, kept at the model's own precision
    )


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Limits on what is decoded and kept."""

    max_item_bytes: int = 32 << 20
    max_pixels: int = 25_000_000  # of an image, or of a clip's frame (a camera's 24 megapixels)
    max_side: int = 16_384  # pixels
    max_images: int = 16  # a request
    max_videos: int = 2  # a request
    max_video_seconds: float = 60.0
    max_video_pixels: int = 4_000_000_000  # all frames of a video together (a minute of 1920 x 1080 at 30 a second)
    max_sampled_pixels: int = 134_000_000  # its frames that are looked at, together (64 of 1920 x 1080)
    max_sampled_frames: int = 768  # the number of these, where a request names the sampling
    decode_workers: int = 2  # processes that decode images and videos, an item each at a time
    decode_threads: int = 2  # of a process, for a long video
    decode_seconds: float = 10.0  # of processor time that an item may take
    decode_bytes: int = 512 << 20  # decoded pixels held at once, 4 bytes each, of all requests
    store_bytes: int = 256 << 20  # uploaded media kept, least recently used first out
    live_bytes: int = 1 << 30  # files and long texts of all requests under way; more is refused with RESOURCE_EXHAUSTED


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Sessions of streaming video: how many, and what each may hold."""

    max_sessions: int = 64  # open at once
    session_bytes: int = 256 << 20  # K/V, features and initialisation segment that one may keep
    total_bytes: int = 2 << 30  # … and all of a model together: more is refused with RESOURCE_EXHAUSTED
    sessions_per_tenant: int = 0  # 0 = as many as there may be
    resume_seconds: float = 60.0  # how long a session without a connection is kept
    idle_seconds: float = 300.0  # a session ends that sends nothing for so long, and has no question under way
    max_questions: int = 8  # of a session at once
    max_watches: int = 32  # standing questions of a session
    credit_pushes: int = 32  # pushes of a session that wait to be decoded …
    credit_bytes: int = 8 << 20  # … and their bytes; no push may be larger
    waiting_frames: int = 16  # decoded frames of a session that wait for the model …
    waiting_bytes: int = 64 << 20  # … and their pixels, 4 bytes each
    frames_under_way: int = 4  # frames of a session that the model has and has not seen yet
    outbox_bytes: int = 4 << 20  # responses that a client has not read, and as much again that it has not confirmed


@dataclass(frozen=True, kw_only=True)
class EncoderCacheConfig:
    """What is kept of media for later requests with the same, in bytes, least recently used first out; 0 = nothing."""

    token_bytes: int = 256 << 20  # visual tokens
    pixel_bytes: int = 64 << 20  # pixels as towers take them: for the same media under another pruner
    kv_bytes: int = 256 << 20  # keys and values, for requests that ask for ``image_reuse``; on the models' devices
    disk_folder: str = ""  # visual tokens are also kept here, over restarts; one server a folder; "" = nowhere
    disk_bytes: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model to serve: a checkpoint directory, a model of the package (``bundled``, ``bundled-causal``), or
    ``hub:owner/name`` (the only way to a network)."""

    path: str = BUNDLED
    companion: str = ""  # path of a causal model with the same tokenizer: for the commit policies that ask for one
    name: str = ""  # "" = the directory's name
    dtype: str = "auto"  # auto = the checkpoint's on a GPU, float32 on a CPU
    device: str = "auto"  # auto = the first GPU if there is one
    # File that `mmserve tune --out` wrote; "" = the checkpoint's own policy.json, if it has one; "off" = none.
    policies: str = ""
    # Tensors of the checkpoint that the model does not need, with `*` and `?` as in file names; others are errors.
    unused_tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """One entry of ``[schedulers.NAME]``: a discrete scheduler that requests may name as their commit policy.

    ``kind`` (the key ``class``) is a class of diffusers, or another with its module in front; ``numbers`` are the
    other keys, and go to its constructor.
    """

    name: str
    kind: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration."""

    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    encoder_cache: EncoderCacheConfig = field(default_factory=EncoderCacheConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    schedulers: tuple[SchedulerConfig, ...] = ()
    tenants: tuple[TenantConfig, ...] = ()  # none, and no auth_tokens = nobody is asked for a token


#: Rows of a prefill and of a decode batch on a CPU, where a pass takes nearly as long as its rows together, and on
#: accelerators, where a few rows take as long as many.
_CPU_ROWS, _ACCELERATOR_ROWS = (256, 256), (2048, 4096)


def resolve(engine: EngineConfig, *, cores: int | None = None, device: str = "cpu") -> EngineConfig:
    """Replace every "auto" of ``engine`` by its number; the engine only ever sees resolved values.

    ``device``: the type of the model's device. Stages × torch threads stays within ``cores`` where that is possible:
    threads of one OpenMP pool spin while they wait, and two pools on the same cores were measured four times slower
    than one thread each.
    """
    cores = cores or len(os.sched_getaffinity(0))
    busy = 1 if engine.stages == "inline" else 3
    pages_each = -(-engine.max_tokens // engine.page_size)
    prefill, decode = _CPU_ROWS if device == "cpu" else _ACCELERATOR_ROWS
    return dataclasses.replace(
        engine,
        torch_threads=engine.torch_threads or max(1, cores // busy),
        pages=engine.pages or engine.max_running * pages_each,
        prefill_tokens=engine.prefill_tokens or prefill,
        decode_tokens=engine.decode_tokens or decode,
    )


def load(path: Path) -> Config:
    """Read a TOML file; raises ``ConfigError`` naming the file, the key and what is accepted."""
    return from_mapping(read(path), source=str(path))


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, unchecked; raises ``ConfigError`` where it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def from_mapping(data: Mapping[str, Any], *, source: str = "config") -> Config:
    """A ``Config`` from nested mappings, each key checked for name and type."""
    known = {
        "server": ServerConfig,
        "engine": EngineConfig,
        "media": MediaConfig,
        "encoder_cache": EncoderCacheConfig,
        "video": VideoConfig,
    }
    tables = [*known, "models", "schedulers", "tenants"]
    if unknown := set(data) - set(tables):
        raise ConfigError(f"{source}: unknown table {sorted(unknown)[0]!r}; known are {tables}")
    parts: dict[str, Any] = {
        name: _section(kind, data[name], f"{source}: [{name}]") for name, kind in known.items() if name in data
    }
    if "models" in data:
        if not isinstance(data["models"], list):
            raise ConfigError(f"{source}: models must be tables, each under [[models]], not {data['models']!r}")
        parts["models"] = tuple(
            _section(ModelConfig, entry, f"{source}: [[models]] {index}") for index, entry in enumerate(data["models"])
        )
    if "schedulers" in data:
        parts["schedulers"] = _schedulers(data["schedulers"], source)
    if "tenants" in data:
        parts["tenants"] = _tenants(data["tenants"], source)
    config = Config(**parts)
    _check(config, source)
    return config


def _schedulers(data: Any, source: str) -> tuple[SchedulerConfig, ...]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: schedulers must be tables, each under [schedulers.NAME], not {data!r}")
    found: list[SchedulerConfig] = []
    for name, entry in data.items():
        where = f"{source}: [schedulers.{name}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must be a table, not {entry!r}")
        numbers = dict(entry)
        kind = numbers.pop("class", None)
        if not isinstance(kind, str):
            raise ConfigError(f"{where} class must be the name of a scheduler's class, not {kind!r}")
        found.append(SchedulerConfig(name=name, kind=kind, numbers=numbers))
    return tuple(found)


def _tenants(data: Any, source: str) -> tuple[TenantConfig, ...]:
    """Values are not repeated in errors: somebody may have written a token there."""
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
        raise ConfigError(f"{source}: tenants must be tables, each under [[tenants]]")
    for index, entry in enumerate(data):
        if "token" in entry:
            raise ConfigError(
                f"{source}: [[tenants]] {index} has no key 'token': put the token into a file and name that as "
                "token_file, or into an environment variable and name that as token_env"
            )
    return tuple(_section(TenantConfig, entry, f"{source}: [[tenants]] {index}") for index, entry in enumerate(data))


#: What a value of each type is called.
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", tuple: "a list of strings"}
#: Keys whose values no error repeats.
_SECRET = frozenset({"auth_tokens", "token_file", "token_env"})


def _section(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table, not {values!r}")
    fields = {f.name: f.default for f in dataclasses.fields(kind)}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{where} has no key {key!r}; it has {sorted(fields)}")
        if isinstance(fields[key], tuple) and isinstance(value, list):
            value = tuple(value)
        wanted = type(fields[key])
        if wanted is float and type(value) is int:
            value = float(value)
        entries: tuple[Any, ...] = value if wanted is tuple and type(value) is tuple else ()
        if type(value) is not wanted or not all(isinstance(entry, str) for entry in entries):
            given = type(value).__name__ if key in _SECRET else repr(value)
            raise ConfigError(f"{where} {key} must be {_KINDS[wanted]}, not {given}")
        checked[key] = value
    return kind(**checked)


#: What ``sparse_prefill`` and ``sparse_decode`` may be: the names of ``kv/sparse.py``, which loads torch.
SPARSE_PREFILL = ("", "vertical_slash", "query_aware", "segments", "sink_window", "random", "oracle")
SPARSE_DECODE = ("", "quest", "double_sparse", "tidal", "sink_window", "random", "oracle")


def _check_sparse(engine: EngineConfig, where: str) -> None:
    for key, known in (("sparse_prefill", SPARSE_PREFILL), ("sparse_decode", SPARSE_DECODE)):
        if getattr(engine, key) not in known:
            raise ConfigError(
                f"{where} {key} must be one of {', '.join(map(repr, known))}, not {getattr(engine, key)!r}"
            )
    for key in ("sparse_density", "sparse_mass"):
        if not 0 < getattr(engine, key) <= 1:
            raise ConfigError(f"{where} {key} must be above 0 and at most 1, not {getattr(engine, key)}")
    for key, used in (("sparse_block", engine.sparse_prefill), ("page_size", engine.sparse_decode)):
        size = getattr(engine, key)
        if used and (size < 16 or size & (size - 1)):
            raise ConfigError(
                f"{where} {key} must be a power of two of at least 16 where attention is sparse, not {size}"
            )


def _check_quantized(engine: EngineConfig, where: str) -> None:
    if engine.kv_bits not in (0, 4, 8):
        raise ConfigError(f"{where} kv_bits must be 8, 4 or 0 for the model's own precision, not {engine.kv_bits}")
    if not 0 <= engine.kv_kept < 1:
        raise ConfigError(f"{where} kv_kept must be at least 0 and below 1, not {engine.kv_kept}")
    if engine.kv_bits and (engine.sparse_prefill or engine.sparse_decode):
        raise ConfigError(f"{where} sparse attention reads K/V at full precision: set kv_bits = 0, or sparse_* = ''")


#: What numbers must at least be (finite, too): table, least, what the least means, keys.
_LEAST = (
    ("server", 0, "", ("port", "metrics_port", "http_port", "drain_seconds")),
    (
        "server",
        0,
        ", which means no limit",
        ("message_seconds", "connection_calls", "connection_idle_seconds", "http_connections"),
    ),
    ("server", 0, ", which means no limit", ("connection_age_seconds", "connection_grace_seconds")),
    ("server", 1, "", ("max_message_bytes", "keepalive_seconds")),
    (
        "engine",
        1,
        "",
        (
            "max_queued",
            "max_samples",
            "max_running",
            "max_pending_per_stage",
            "page_size",
            "max_tokens",
            "encode_batch",
        ),
    ),
    ("engine", 0, ", which means auto", ("torch_threads", "pages", "prefill_tokens", "decode_tokens")),
    ("engine", 0, ", which means no limit", ("max_wait_seconds",)),
    ("media", 1, "", ("max_item_bytes", "max_pixels", "max_side", "live_bytes", "max_sampled_frames")),
    ("media", 1, "", ("decode_workers", "decode_threads", "decode_seconds", "decode_bytes")),
    ("media", 0, "", ("max_images", "max_videos", "max_video_seconds", "max_video_pixels", "max_sampled_pixels")),
    ("media", 0, "", ("store_bytes",)),
    (
        "encoder_cache",
        0,
        ", which means that nothing is kept",
        ("token_bytes", "pixel_bytes", "kv_bytes", "disk_bytes"),
    ),
    ("video", 0, "", ("sessions_per_tenant", "resume_seconds", "max_watches")),
    ("video", 1, "", ("max_sessions", "session_bytes", "total_bytes")),
    ("video", 1, "", ("idle_seconds", "max_questions", "credit_pushes", "credit_bytes", "waiting_frames")),
    ("video", 1, "", ("waiting_bytes", "frames_under_way", "outbox_bytes")),
)
#: The most that gRPC, whose options are 32-bit integers, takes: bytes, and seconds (in milliseconds).
_MOST_SECONDS = ((1 << 31) - 1) // 1000
_MOST = {
    "port": 65535,
    "metrics_port": 65535,
    "http_port": 65535,
    "max_message_bytes": (1 << 31) - 1,
    "connection_calls": (1 << 31) - 1,
    "keepalive_seconds": _MOST_SECONDS,
    "connection_idle_seconds": _MOST_SECONDS,
    "connection_age_seconds": _MOST_SECONDS,
    "connection_grace_seconds": _MOST_SECONDS,
}


def _check_numbers(config: Config, source: str) -> None:
    for table, least, meaning, keys in _LEAST:
        for key in keys:
            value = getattr(getattr(config, table), key)
            if not least <= value < math.inf:
                raise ConfigError(f"{source}: [{table}] {key} must be at least {least}{meaning}, not {value}")
    for key, most in _MOST.items():
        if getattr(config.server, key) > most:
            raise ConfigError(f"{source}: [server] {key} must be at most {most}, not {getattr(config.server, key)}")


def _check_server(server: ServerConfig, where: str) -> None:
    for key in ("host", "metrics_host"):
        if not getattr(server, key):
            which = "'127.0.0.1' is this machine alone, '0.0.0.0' every network"
            raise ConfigError(f"{where} {key} must not be empty: {which}")
    for one, other in (("metrics_port", "port"), ("http_port", "port"), ("http_port", "metrics_port")):
        if getattr(server, one) and getattr(server, one) == getattr(server, other):
            raise ConfigError(f"{where} {one} must be another than {other}: they speak different protocols")
    if not all(map(is_token, server.auth_tokens)):
        raise ConfigError(f"{where} auth_tokens must be printable ASCII, and none of them empty")
    if bool(server.tls_certificate) != bool(server.tls_key):
        raise ConfigError(f"{where} tls_certificate and tls_key go together")
    if server.tls_client_ca and not server.tls_key:
        raise ConfigError(f"{where} tls_client_ca needs tls_certificate and tls_key")


def _check_plaintext(config: Config, where: str) -> None:
    server = config.server
    guarded = config.tenants or server.auth_tokens
    if guarded and not server.tls_key and not is_loopback(server.host) and not server.allow_plaintext_tokens:
        raise ConfigError(
            f"{where} tokens would travel in plaintext: set tls_certificate and tls_key, listen on '127.0.0.1', or set "
            "allow_plaintext_tokens = true where something in front of the server encrypts"
        )


def _check(config: Config, source: str) -> None:
    _check_numbers(config, source)
    _check_server(config.server, f"{source}: [server]")
    check_tenants(config.tenants, source)
    _check_plaintext(config, f"{source}: [server]")
    if config.engine.stages not in ("threads", "inline"):
        raise ConfigError(f"{source}: [engine] stages must be 'threads' or 'inline', not {config.engine.stages!r}")
    if config.engine.cuda_graphs not in ("auto", "off"):
        raise ConfigError(f"{source}: [engine] cuda_graphs must be 'auto' or 'off', not {config.engine.cuda_graphs!r}")
    _check_sparse(config.engine, f"{source}: [engine]")
    _check_quantized(config.engine, f"{source}: [engine]")
    if not config.models:
        raise ConfigError(f"{source}: name at least one model under [[models]]")
