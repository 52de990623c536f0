"""Metrics of a whole server: versions, loaded models, and calls by status.

The names and labels of the call metrics are those of go-grpc-middleware, used by dashboards for gRPC servers.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import mmserve
from mmserve.core.info import ModelInfo
from mmserve.observe.labelled import Labelled

PREFIX = "mmserve:"
MODEL = "model_name"
#: Packages whose versions affect the results of a server.
_BUILT_OF = ("torch", "triton", "transformers", "grpcio")
_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600)


def family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    """A metric family of ``kind``; ``samples`` are pairs of label values and a number."""
    made = kind(PREFIX + name, text, labels=labels)
    for values, number in samples:
        made.add_metric(values, number)
    return made


class Described(Protocol):
    """An engine that describes its model."""

    @property
    def info(self) -> ModelInfo:
        """The description of its model, as clients receive it."""
        ...


class Calls:
    """Counts of calls by method and status, of uploads, and latencies of calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_service", "grpc_method")
        text = "Calls by the status that they ended with"
        self._handled = Labelled(Counter("grpc_server_handled", text, (*labels, "grpc_code"), registry=registry))
        self._seconds = Labelled(
            Histogram(
                "grpc_server_handling_seconds",
                "From a call's arrival to its status",
                labels,
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self._uploads = Counter(PREFIX + "media_uploads", "Uploads by outcome", ("result",), registry=registry)
        self._upload_bytes = Counter(
            PREFIX + "media_upload_bytes", "Bytes of uploads that were accepted", registry=registry
        )

    def handled(self, method: str, code: str, seconds: float) -> None:
        """Count a call of ``/service/method``; "" = an unknown method, as text from a client must not become a
        label."""
        service, _, name = method.removeprefix("/").rpartition("/")
        self._handled.of(service or "unknown", name or "unknown", code).inc()
        self._seconds.of(service or "unknown", name or "unknown").observe(seconds)

    def uploaded(self, size: int, *, deduplicated: bool) -> None:
        """Count an accepted upload of ``size`` bytes."""
        self._uploads.labels("deduplicated" if deduplicated else "stored").inc()
        self._upload_bytes.inc(size)

    def upload_failed(self, code: str) -> None:
        """Count an upload that failed with the error code ``code``."""
        self._uploads.labels(code).inc()


class Unasked(Collector):
    """A collector whose names are not read at registration: engines may not have started by then."""

    def describe(self) -> Iterator[Metric]:
        """Yields nothing."""
        return iter(())


class Models(Unasked):
    """The description of each loaded model, read at each scrape."""

    def __init__(self, engines: Mapping[str, Described]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """The metric families, with one sample a model."""
        described = InfoMetricFamily(PREFIX + "model", "A loaded model", labels=(MODEL,))
        models = {name: engine.info for name, engine in self._engines.items()}
        for name, info in models.items():
            kernels = {f"kernel_{op}": path for op, path in info.kernels.items()}
            what = {"architecture": info.architecture, "dtype": info.dtype, "device": info.device, **kernels}
            described.add_metric((name,), what)
        yield described
        parameters = (((name,), info.parameters) for name, info in models.items())
        yield family(GaugeMetricFamily, "model_parameters", "Parameters of a loaded model", (MODEL,), parameters)


def add_build(registry: CollectorRegistry) -> None:
    """Register the versions of mmserve, Python and the packages that affect results."""
    versions = {name: found for name in _BUILT_OF if (found := _version(name))}
    info = Info(PREFIX + "build", "Versions of the server and of what it is built of", registry=registry)
    info.info({"version": mmserve.__version__, "python": platform.python_version(), **versions})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # Triton is not installed on every platform
        return ""
