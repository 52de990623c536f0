"""Server configuration: frozen dataclasses, read from TOML, with "auto" values resolved once.

Example (every key has a default)::

    [server]
    port = 50051
    [engine]
    max_queued = 256
    [[models]]
    name = "scenes"
    path = "bundled"
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmserve.config.engine import SPARSE_DECODE, SPARSE_PREFILL, EngineConfig, check_engine, resolve
from mmserve.config.kv_cache import KVCacheConfig
from mmserve.config.media import EncoderCacheConfig, MediaConfig, VideoConfig
from mmserve.config.models import BUNDLED, ModelConfig, SchedulerConfig
from mmserve.config.server import ServerConfig, check_server
from mmserve.core.slo import SLO
from mmserve.core.values import values
from mmserve.errors import ConfigError
from mmserve.tenants import TenantConfig, check_tenants, is_loopback

#: Tables of a file with one section each.
SECTIONS: dict[str, type[Any]] = {
    "server": ServerConfig,
    "engine": EngineConfig,
    "media": MediaConfig,
    "encoder_cache": EncoderCacheConfig,
    "kv_cache": KVCacheConfig,
    "video": VideoConfig,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration."""

    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    encoder_cache: EncoderCacheConfig = field(default_factory=EncoderCacheConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    schedulers: tuple[SchedulerConfig, ...] = ()
    slo: tuple[SLO, ...] = ()  # latency classes that requests may name
    tenants: tuple[TenantConfig, ...] = ()  # without tenants and auth_tokens, no token is required

    def one_model(self, command: str) -> ModelConfig:
        """The single configured model, for ``command``; raises ``ConfigError`` if there are several."""
        if len(self.models) != 1:
            raise ConfigError(f"`mmserve {command}` measures one model, not {len(self.models)}: name one with --model")
        return self.models[0]


def load(path: Path) -> Config:
    """Read a TOML file; raises ``ConfigError`` naming the file, the key and what is accepted."""
    return from_mapping(read(path), source=str(path))


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, not validated; raises ``ConfigError`` if it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def from_mapping(data: Mapping[str, Any], *, source: str = "config") -> Config:
    """A ``Config`` from nested mappings, each key checked for name and type."""
    tables = [*SECTIONS, "models", "schedulers", "slo", "tenants"]
    if unknown := set(data) - set(tables):
        raise ConfigError(f"{source}: unknown table {min(unknown)!r}; {_known(min(unknown), tables)}")
    parts: dict[str, Any] = {
        name: section(kind, data[name], f"{source}: [{name}]") for name, kind in SECTIONS.items() if name in data
    }
    if "models" in data:
        if not isinstance(data["models"], list):
            raise ConfigError(f"{source}: models must be tables, each under [[models]], not {data['models']!r}")
        parts["models"] = tuple(
            section(ModelConfig, entry, f"{source}: [[models]] {index}") for index, entry in enumerate(data["models"])
        )
    if "schedulers" in data:
        parts["schedulers"] = _schedulers(data["schedulers"], source)
    if "slo" in data:
        parts["slo"] = _slo(data["slo"], source)
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


def _slo(data: Any, source: str) -> tuple[SLO, ...]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: slo must be tables, each under [slo.NAME], not {data!r}")
    found: list[SLO] = []
    for name, entry in data.items():
        where = f"{source}: [slo.{name}]"
        if isinstance(entry, Mapping) and "name" in entry:
            raise ConfigError(f"{where} has no key 'name': its name is in the head of the table")
        made: SLO = replace(section(SLO, entry, where), name=name)
        if not (made.first_token_seconds or made.per_token_seconds):
            raise ConfigError(f"{where} needs first_token_seconds, per_token_seconds or both")
        found.append(made)
    return tuple(found)


def _tenants(data: Any, source: str) -> tuple[TenantConfig, ...]:
    """Values are not repeated in errors, because they may contain a token."""
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
        raise ConfigError(f"{source}: tenants must be tables, each under [[tenants]]")
    for index, entry in enumerate(data):
        if "token" in entry:
            raise ConfigError(
                f"{source}: [[tenants]] {index} has no key 'token': put the token into a file and name that as "
                "token_file, or into an environment variable and name that as token_env"
            )
    return tuple(section(TenantConfig, entry, f"{source}: [[tenants]] {index}") for index, entry in enumerate(data))


#: Names of types in errors.
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", tuple: "a list of strings"}
#: Keys whose values are not repeated in errors.
_SECRET = frozenset({"auth_tokens", "token_file", "token_env"})


def _known(name: str, known: Collection[str]) -> str:
    """The accepted names instead of ``name``, the most similar one first."""
    similar = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {similar[0]!r}? " if similar else "") + f"Known are {', '.join(known)}"


def section(kind: type[Any], given: Mapping[str, Any], where: str) -> Any:
    """A ``kind`` from the keys of a table, each checked for name, type and range; raises ``ConfigError``."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a table, not {given!r}")
    fields, ranges = {f.name: f.default for f in dataclasses.fields(kind)}, values(kind)
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(f"{where} has no key {key!r}; {_known(key, fields)}")
        if isinstance(fields[key], tuple) and isinstance(value, list):
            value = tuple(value)
        wanted = type(fields[key])
        if wanted is float and type(value) is int:
            value = float(value)
        entries: tuple[Any, ...] = value if wanted is tuple and type(value) is tuple else ()
        if type(value) is not wanted or not all(isinstance(entry, str) for entry in entries):
            shown = type(value).__name__ if key in _SECRET else repr(value)
            raise ConfigError(f"{where} {key} must be {_KINDS[wanted]}, not {shown}")
        accepted = ranges[key].range
        if accepted is not None and not accepted.holds(value):
            shown = "" if key in _SECRET or value == "" else f", not {value!r}"
            raise ConfigError(f"{where} {key} must be {accepted.words}{shown}")
        checked[key] = value
    return kind(**checked)


def _check_plaintext(config: Config, where: str) -> None:
    server = config.server
    guarded = config.tenants or server.auth_tokens
    if guarded and not server.tls_key and not is_loopback(server.host) and not server.allow_plaintext_tokens:
        raise ConfigError(
            f"{where} tokens would travel in plaintext: set tls_certificate and tls_key, listen on '127.0.0.1', or set "
            "allow_plaintext_tokens = true where something in front of the server encrypts"
        )


def _check(config: Config, source: str) -> None:
    check_server(config.server, f"{source}: [server]")
    check_engine(config.engine, f"{source}: [engine]")
    check_tenants(config.tenants, source)
    _check_plaintext(config, f"{source}: [server]")
    if not config.models:
        raise ConfigError(f"{source}: name at least one model under [[models]]")


__all__ = [
    "BUNDLED",
    "SECTIONS",
    "SLO",
    "SPARSE_DECODE",
    "SPARSE_PREFILL",
    "Config",
    "EncoderCacheConfig",
    "EngineConfig",
    "KVCacheConfig",
    "MediaConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "TenantConfig",
    "VideoConfig",
    "from_mapping",
    "load",
    "read",
    "resolve",
    "section",
]
