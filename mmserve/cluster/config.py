"""``cluster.toml``: the workers of a cluster, and their settings.

Example (every key except for ``roles`` has a default)::

    [cluster]
    address = "local"
    [[workers]]
    roles = "e"
    count = 2
    [[workers]]
    roles = "pd"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.config import read, section
from mmserve.core.handover import ROLES
from mmserve.core.values import ABOVE_0, Range, at_least, one_of, value
from mmserve.errors import ConfigError

#: Stages by their letters in ``roles``.
LETTERS: Mapping[str, str] = {role[0]: role for role in ROLES}
_ROLES = Range("one or more of the letters e, p and d", lambda letters: bool(letters) and set(letters) <= set(LETTERS))


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """``[cluster]``: placement, supervision and role switching of the workers."""

    address: str = value("local", meaning="'local' starts a Ray cluster on this host; 'auto' or an address joins one")
    placement: str = value(
        "PACK", one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"), "how Ray spreads the workers over hosts"
    )
    spares: int = value(
        1, at_least(0), "workers with their models loaded that wait to take a lost one's place, for each value of cpus"
    )
    transport: str = value(
        "auto",
        one_of("auto", "shared_memory", "object_store", "nixl"),
        "how states travel; auto: shared memory within a host, Ray's object store between hosts; "
        "nixl: by RDMA where there is any (mmserve[nixl])",
    )
    save_every: int = value(8, at_least(0), "decode steps between two saved states of an answer; 0 = none")
    ahead_kb: int = value(
        1024,
        at_least(0, meaning="with it"),
        "keys and values of a prompt go to its decode worker while it is prefilled, in parts of so many KiB",
    )
    kv_bits: int = value(
        0,
        one_of(0, 4, 5, 6, 7, 8),
        "bits in which keys and values of prompts go to decode, which changes answers; 0 = as they are",
    )
    save_frames: int = value(
        16, at_least(0), "frames of a video session between two saved states; 0 = none, a session ends with its worker"
    )
    silent_seconds: float = value(5.0, ABOVE_0, "a worker that reports nothing for so long is replaced")
    slow_factor: float = value(
        4.0, at_least(0), "a worker whose passes take so many times as long as usual is given no work; 0 = none is"
    )
    max_losses: int = value(8, at_least(1), "workers that a request may lose before it fails")
    switching: bool = value(True, meaning="workers change roles when one stage has much more to do than another")
    decide_seconds: float = value(5.0, ABOVE_0, "time between two changes of roles, at least")
    shard_pixels: int = value(
        1_000_000,
        at_least(0, meaning="never"),
        "a request's images and videos of so many pixels together are shared among encode workers with nothing to do",
    )
    object_store_mb: int = value(128, at_least(75), "memory of Ray's object store on a local cluster (MiB)")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """``[[workers]]``: ``count`` workers of the same kind."""

    roles: str = value("epd", _ROLES, "the stages it runs: e(ncode), p(refill), d(ecode)")
    count: int = value(1, at_least(1), "workers of this kind")
    cpus: float = value(1.0, at_least(0), "cores that Ray reserves for each, and threads of torch")
    gpus: float = value(0.0, at_least(0), "GPUs that Ray reserves for each")

    @property
    def stages(self) -> frozenset[str]:
        """The names of its stages."""
        return frozenset(LETTERS[letter] for letter in self.roles)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The whole file."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    workers: tuple[WorkerSettings, ...] = (WorkerSettings(),)

    @property
    def each(self) -> tuple[WorkerSettings, ...]:
        """The settings of every worker, one entry each."""
        return tuple(worker for worker in self.workers for _ in range(worker.count))


def load_cluster(path: Path) -> ClusterConfig:
    """Read a TOML file; raises ``ConfigError`` naming the file, the key and what is accepted."""
    return cluster_config(read(path), source=str(path))


def cluster_config(data: Mapping[str, Any], *, source: str = "cluster") -> ClusterConfig:
    """A ``ClusterConfig`` from nested mappings, each key checked for name, type and range."""
    if unknown := set(data) - {"cluster", "workers"}:
        raise ConfigError(f"{source}: unknown table {sorted(unknown)[0]!r}; known are ['cluster', 'workers']")
    kinds = data.get("workers", [])
    if not isinstance(kinds, list) or not kinds:
        raise ConfigError(f"{source}: there must be workers, each kind under [[workers]]")
    workers = tuple(section(WorkerSettings, each, f"{source}: [[workers]] {i}") for i, each in enumerate(kinds))
    settings = section(ClusterSettings, data.get("cluster", {}), f"{source}: [cluster]")
    done = frozenset().union(*(worker.stages for worker in workers))
    if missing := [role for role in ROLES if role not in done]:
        raise ConfigError(f"{source}: no worker has the role {missing[0]!r}: every stage needs one")
    return ClusterConfig(cluster=settings, workers=workers)
