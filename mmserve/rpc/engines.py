"""The engines of one server: the models that serve, and the names of those that are loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import replace
from typing import Any, Protocol

from mmserve.core.cached import Block
from mmserve.core.constraint import CheckedConstraint
from mmserve.core.events import Event
from mmserve.core.info import AdapterInfo, ModelInfo
from mmserve.core.progress import Progress
from mmserve.core.request import Request
from mmserve.core.stats import Stats
from mmserve.errors import MMServeError, Unavailable, UnknownModel


class EngineLike(Protocol):
    """The server's interface to an engine; thread-safe."""

    @property
    def info(self) -> ModelInfo:
        """The description of its model."""

    def start(self) -> None:
        """Start serving."""

    def submit(self, request: Request, sink: Callable[[Event | Progress], None]) -> None:
        """Admit ``request``, or raise ``ResourceExhausted`` or ``Unavailable``; ``sink`` gets its events and, if it has
        a ``trace``, its progress."""

    def check_constraint(self, request: Request, answer: str | None) -> CheckedConstraint | None:
        """Check whether the constraint of ``request`` can be enforced, and whether ``answer`` obeys it; may take
        seconds.

        None if only running the request determines it. Raises the errors that the request would fail with.
        """

    def prompt_ids(
        self, request: Request, special_tokens: bool = True, generation_prompt: bool = True
    ) -> Sequence[int]:
        """Token ids of the prompt of ``request``, which is text, of any length.

        ``special_tokens``: whether a raw text has those of the tokenizer; ``generation_prompt``: whether a chat ends
        with the beginning of an answer. Raises the errors that the request would fail with.
        """

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """The names of tokens in the vocabulary."""

    def detokenized(self, ids: Sequence[int]) -> str:
        """The text of tokens, with special tokens. Raises ``InvalidArgument`` for ids that are not in the
        vocabulary."""

    def stats(self) -> Stats:
        """A snapshot of its counters."""

    def cancel(self, request_id: str, error: MMServeError | None = None) -> None:
        """End a request with ``error`` (default ``Cancelled``); unknown or ended requests are ignored."""

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for running ones, at most ``timeout`` seconds; then fail the rest.

        Returns whether all ended by themselves. May be called again, with a shorter time, while the first call
        waits.
        """

    def stop(self) -> None:
        """End its threads."""


class AdaptersLike(Protocol):
    """The adapters of a model (see ``models.adapters.Adapters``); thread-safe, and slow except for ``listed``."""

    def load(self, name: str) -> AdapterInfo: ...

    def drop(self, name: str) -> None: ...

    def listed(self) -> list[AdapterInfo]: ...


def adapters_of(engine: EngineLike) -> AdaptersLike | None:
    """The adapters of an engine's model; None if it does not support them."""
    found: AdaptersLike | None = getattr(engine, "adapters", None)
    return found


class EntriesLike(Protocol):
    """Cache entries; thread-safe, and slow."""

    def blocks(self) -> list[Block]: ...

    def pin(self, ids: Sequence[str], pinned: bool) -> int: ...

    def drop(self, ids: Sequence[str]) -> int: ...


class EngineCachesLike(EntriesLike, Protocol):
    """The caches of an engine (see ``engine.prefixes.EngineCaches``); thread-safe, and slow."""

    def others(self, served: Collection[str], model: str = "") -> EntriesLike:
        """Entries of models that are not served (see ``tiers.leftover.Leftover``)."""

    def prefix_of(self, request: str) -> str: ...

    def unpin_in_memory(self, successor: Any = None) -> None:
        """Unpin what a stopped engine has in memory (see ``engine.prefixes.EngineCaches.unpin_in_memory``)."""


def caches_of(engine: EngineLike) -> EngineCachesLike | None:
    """The caches of ``engine``; None if they cannot be managed."""
    found: EngineCachesLike | None = getattr(engine, "caches", None)
    return found


def own_adapter(engine: EngineLike, name: str) -> str:
    """``name`` if the engine's model has an adapter of that name, else empty."""
    adapters = adapters_of(engine)
    return name if adapters is not None and any(adapter.name == name for adapter in adapters.listed()) else ""


def info_with(engine: EngineLike, adapter: str) -> ModelInfo:
    """The description of an engine's model for requests with ``adapter`` (empty = none), which may have a block length
    of its own."""
    info, adapters = engine.info, adapters_of(engine)
    if not adapter or adapters is None or not info.diffusion:
        return info
    own = next((each.block_length for each in adapters.listed() if each.name == adapter), 0)
    return replace(info, block_length=own) if own else info


class Engines(Mapping[str, EngineLike]):
    """Engines by model name, for the models that serve, in the order of ``names``; the first is the default.

    May be read from any thread while engines are added and replaced: ``items`` and ``values`` are snapshots.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._serving: dict[str, EngineLike] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All models of the server, loaded or not."""
        return self._names

    @property
    def loading(self) -> tuple[str, ...]:
        """Models that are still loading."""
        return tuple(name for name in self._names if name not in self._serving)

    def add(self, name: str, engine: EngineLike) -> None:
        """Serve a started engine as model ``name``, one of ``names``."""
        if name not in self._names:
            raise ValueError(f"{name!r} is not a model of this server: {self._names}")
        self._serving[name] = engine

    def replace(self, names: Sequence[str], fresh: Mapping[str, EngineLike]) -> list[EngineLike]:
        """Serve ``names`` from now on: by ``fresh`` started engines, and by those that serve already.

        Returns the engines to be stopped; their requests in progress continue.
        """
        before = dict(self._serving)
        kept = {name: engine for name, engine in {**before, **fresh}.items() if name in names}
        self._serving, self._names = kept, tuple(names)
        return [engine for name, engine in before.items() if kept.get(name) is not engine]

    def split(self, name: str) -> tuple[str, str]:
        """Splits ``name`` into a model's name and, after a colon, an adapter's; the latter may be empty."""
        model, _colon, adapter = name.rpartition(":")
        return (model, adapter) if name not in self._names and model in self._names else (name, "")

    def names_of(self, model: str) -> list[str]:
        """The names that requests may use for ``model``, which serves: alone, and with each of its adapters."""
        adapters = adapters_of(self._serving[model])
        loaded = [] if adapters is None else adapters.listed()
        return [model, *(f"{model}:{adapter.name}" for adapter in loaded)]

    def find(self, name: str) -> EngineLike:
        """The engine of model ``name``; that of the default model for an empty name.

        Raises ``UnknownModel``, listing the known models, or ``Unavailable`` while the model is loading.
        """
        wanted = name or self._names[0]
        engine = self._serving.get(wanted)
        if engine is not None:
            return engine
        if wanted in self._names:
            raise Unavailable(f"the model {wanted!r} is loading; try again in a few seconds")
        raise UnknownModel(f"no model {name!r} here; there is {', '.join(self._names)}")

    def named(self, name: str) -> EngineLike:
        """The engine for a name of ``names_of``: that of a model, or of a model with one of its adapters. Raises as
        ``find``."""
        model, adapter = self.split(name)
        engine = self.find(model)
        if adapter and name not in (known := self.names_of(engine.info.name)):
            has = ", ".join(each.removeprefix(f"{model}:") for each in known[1:])
            raise UnknownModel(f"model {model!r} has no adapter {adapter!r}; there is: {has or 'none is loaded'}")
        return engine

    def any_ready(self) -> list[EngineLike]:
        """All engines that serve; raises ``Unavailable`` if there are none yet."""
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
        """Names and engines that serve now (a snapshot)."""
        return self._now().items()

    def values(self) -> ValuesView[EngineLike]:
        """Engines that serve now (a snapshot)."""
        return self._now().values()

    def _now(self) -> dict[str, EngineLike]:
        serving, names = self._serving, self._names
        return {name: engine for name in names if (engine := serving.get(name)) is not None}
