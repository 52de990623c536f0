"""The engines of one server: the models that serve, and the names of those that are still loading."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Protocol

from mmserve.core.cached import Block
from mmserve.core.constraint import CheckedConstraint
from mmserve.core.events import Event
from mmserve.core.info import AdapterInfo, ModelInfo
from mmserve.core.progress import Progress
from mmserve.core.request import Request
from mmserve.core.stats import Stats
from mmserve.errors import MMServeError, NotFound, Unavailable


class EngineLike(Protocol):
    """What the server needs of an engine; every method may be called from any thread."""

    @property
    def info(self) -> ModelInfo:
        """The model it runs."""

    def start(self) -> None:
        """Begin to serve."""

    def submit(self, request: Request, sink: Callable[[Event | Progress], None]) -> None:
        """Take ``request``, or raise ``ResourceExhausted`` or ``Unavailable``; ``sink`` then gets its events, and
        its progress where it has a ``trace``."""

    def check_constraint(self, request: Request, answer: str | None) -> CheckedConstraint | None:
        """Whether the constraint of ``request`` can be kept, and whether ``answer`` obeys it; may take seconds.

        None where only the request itself can find out. Raises what the request would fail with.
        """

    def prompt_tokens(self, request: Request) -> int | None:
        """Tokens of the prompt of ``request``, from its text alone; None where only the request itself can find out.

        Raises what the request would fail with.
        """

    def stats(self) -> Stats:
        """What it holds and has counted."""

    def cancel(self, request_id: str, error: MMServeError | None = None) -> None:
        """End a request with ``error`` (default ``Cancelled``); an unknown or ended one is ignored."""

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for the running ones, ``timeout`` seconds at most; fail the rest.

        True if all ended by themselves. May be called again, with a shorter time, while a first call waits.
        """

    def stop(self) -> None:
        """End its threads."""


class AdaptersLike(Protocol):
    """The adapters of a model, as ``models.adapters.Adapters`` has them; slow but for ``listed``, for any thread."""

    def load(self, name: str) -> AdapterInfo: ...

    def drop(self, name: str) -> None: ...

    def listed(self) -> list[AdapterInfo]: ...


def adapters_of(engine: EngineLike) -> AdaptersLike | None:
    """The adapters of an engine's model; None where the engine has none."""
    found: AdaptersLike | None = getattr(engine, "adapters", None)
    return found


class KeptLike(Protocol):
    """What an engine keeps for later requests, as ``engine.prefixes.Kept`` has it; slow, for calls from any thread."""

    def blocks(self) -> list[Block]: ...

    def pin(self, ids: Sequence[str], pinned: bool) -> int: ...

    def drop(self, ids: Sequence[str]) -> int: ...

    def prefix_of(self, request: str) -> str: ...


def kept_of(engine: EngineLike) -> KeptLike | None:
    """What ``engine`` keeps; None where that cannot be managed."""
    found: KeptLike | None = getattr(engine, "kept", None)
    return found


def own_adapter(engine: EngineLike, name: str) -> str:
    """``name`` where the engine's model has an adapter of that name, else empty."""
    adapters = adapters_of(engine)
    return name if adapters is not None and any(adapter.name == name for adapter in adapters.listed()) else ""


class Engines(Mapping[str, EngineLike]):
    """Model name to engine, for the models that serve; the order is that of ``names``, whose first is the default.

    May be read from any thread while engines are added and replaced: ``items`` and ``values`` are of one moment.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._serving: dict[str, EngineLike] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Every model of the server, loaded or not."""
        return self._names

    @property
    def loading(self) -> tuple[str, ...]:
        """Models that do not serve yet."""
        return tuple(name for name in self._names if name not in self._serving)

    def add(self, name: str, engine: EngineLike) -> None:
        """Serve a started engine as model ``name``, which is one of ``names``."""
        if name not in self._names:
            raise ValueError(f"{name!r} is not a model of this server: {self._names}")
        self._serving[name] = engine

    def replace(self, names: Sequence[str], fresh: Mapping[str, EngineLike]) -> list[EngineLike]:
        """Serve ``names`` from now on: ``fresh`` started engines, and those that serve already.

        Returns the engines to stop; their requests in progress are not disturbed.
        """
        before = dict(self._serving)
        kept = {name: engine for name, engine in {**before, **fresh}.items() if name in names}
        self._serving, self._names = kept, tuple(names)
        return [engine for name, engine in before.items() if kept.get(name) is not engine]

    def split(self, name: str) -> tuple[str, str]:
        """A model's name, and that of the adapter after a colon in ``name``; empty where there is none."""
        model, _colon, adapter = name.rpartition(":")
        return (model, adapter) if name not in self._names and model in self._names else (name, "")

    def names_of(self, model: str) -> list[str]:
        """Names that requests may ask for: that of ``model``, which serves, and with each of its adapters."""
        adapters = adapters_of(self._serving[model])
        loaded = [] if adapters is None else adapters.listed()
        return [model, *(f"{model}:{adapter.name}" for adapter in loaded)]

    def find(self, name: str) -> EngineLike:
        """The engine of model ``name``, of the default model for an empty name.

        Raises ``NotFound``, which lists the known models, or ``Unavailable`` while the model is loading.
        """
        wanted = name or self._names[0]
        engine = self._serving.get(wanted)
        if engine is not None:
            return engine
        if wanted in self._names:
            raise Unavailable(f"the model {wanted!r} is loading; try again in a few seconds")
        raise NotFound(f"no model {name!r} here; there is {', '.join(self._names)}")

    def any_ready(self) -> list[EngineLike]:
        """Every engine that serves; raises ``Unavailable`` where there is none yet."""
        ready = list(self.values())
        if not ready:
            raise Unavailable(f"the server is loading {', '.join(self._names)}; try again in a few seconds")
        return ready

    def __getitem__(self, name: str) -> EngineLike:
        return self._serving[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if name in self._serving])

    def __len__(self) -> int:
        return len(self._serving)

    def items(self) -> ItemsView[str, EngineLike]:
        """Names and engines that serve now."""
        return self._now().items()

    def values(self) -> ValuesView[EngineLike]:
        """Engines that serve now."""
        return self._now().values()

    def _now(self) -> dict[str, EngineLike]:
        serving, names = self._serving, self._names
        return {name: engine for name in names if (engine := serving.get(name)) is not None}
