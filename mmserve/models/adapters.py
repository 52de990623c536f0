"""The LoRA adapters of one model: loading, listing, dropping, and their memory limit."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from mmserve.core.info import AdapterInfo
from mmserve.core.request import Request, RequestId
from mmserve.core.samples import samples
from mmserve.errors import ConfigError, InvalidArgument, NotFound, ResourceExhausted, Unimplemented, UnknownModel
from mmserve.models.base import LoadedModel, Model, ModelSpec
from mmserve.models.checkpoint import GENERATION
from mmserve.models.lora import Adapter, Stacks
from mmserve.models.lora_files import adapter_bytes, read_adapter

#: Syntax of adapter names: they are folder names, and follow a model's name and a colon.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Reserved adapters for questions about video streams, for typed questions, and for requests with tools: used if the
#: checkpoint has them and the request names no other.
STREAMS, DECISIONS, TOOLS = "streams", "decisions", "tools"


class Adapters:
    """Adapters of ``model`` from subfolders of ``folder`` and of its checkpoint, with at most ``most`` bytes of
    weights.

    The stacked weights of recent batches may take as many bytes again. Thread-safe.
    """

    def __init__(self, model: Model, *, folder: str = "", most: int = 0) -> None:
        self._model, self._folder, self._most = model, folder, most
        self._by_key: dict[str, Adapter] = {}
        self._names: dict[str, str] = {}  # name to key
        self._waiting: dict[RequestId, Adapter] = {}  # adapters of requests that have not ended
        self._lock = threading.Lock()
        self.stacks = Stacks(most)

    def load_own(self) -> None:
        """Load the adapters of the model's checkpoint. Raises ``InvalidArgument`` and ``ResourceExhausted`` as
        ``load``."""
        for folder in sorted(self._own.iterdir()) if self._own is not None else ():
            if folder.is_dir():
                self.load(folder.name)

    def load(self, name: str) -> AdapterInfo:
        """Load the adapter ``name``, replacing one of that name; admitted requests continue with the old one.

        Raises ``Unimplemented`` if the model does not support adapters, ``NotFound``, ``InvalidArgument`` for invalid
        files, ``ResourceExhausted`` if memory is too small.
        """
        made = self._read(name)
        with self._lock:
            self._check_capacity(name, made.bytes)
            old = self._names.get(name)
            if old is not None:
                del self._by_key[old]
            self._by_key[made.key], self._names[name] = made, made.key
        self.stacks.clear()
        return _info(made)

    def hold(self, name: str) -> AdapterInfo:
        """Load the adapter ``name`` for requests that use its key (``key_of``), until ``forget``; does not replace
        others of that name. Raises the errors of ``load``."""
        made = self._read(name)
        with self._lock:
            if made.key not in self._by_key:
                self._check_capacity("", made.bytes)  # without replacing one of that name
                self._by_key[made.key] = made
        return _info(made)

    def discard(self, keys: Iterable[str]) -> None:
        """Hold the adapters with these keys no longer; requests that decode with them continue."""
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)
            self._names = {name: key for name, key in self._names.items() if key in self._by_key}
        self.stacks.clear()

    def _read(self, name: str) -> Adapter:
        model = self._taking()
        if not NAME.fullmatch(name):
            raise InvalidArgument.of("adapter", f"must match {NAME.pattern}, not {name!r}")
        folder = self._find(name)
        try:
            size = adapter_bytes(folder)
            with self._lock:
                self._check_capacity(name, size)
            made = read_adapter(name, folder, model.decoder, model.dtype, model.device)
            _check_block_length(model.spec, made.block_length)
        except ConfigError as error:
            raise InvalidArgument.of("adapter", str(error)) from error
        return made

    def drop(self, name: str) -> None:
        """Stop serving ``name``; admitted requests continue with it. Raises ``NotFound``."""
        with self._lock:
            if name not in self._names:
                raise unknown(self._model.spec.name, name, self._names)
            del self._by_key[self._names.pop(name)]
        self.stacks.clear()

    def listed(self) -> list[AdapterInfo]:
        """The loaded adapters, by name."""
        with self._lock:
            return [_info(self._by_key[self._names[name]]) for name in sorted(self._names)]

    def resolved(self, request: Request) -> Request:
        """``request`` with its adapter's name replaced by the key, so that adapters loaded later under that name do not
        affect it, and with the adapter's block length if it has none.

        Raises ``NotFound`` if there is none, ``Unimplemented`` if the model does not support adapters.
        """
        if not request.adapter:
            return request
        self._taking()
        with self._lock:
            key = self._names.get(request.adapter)
            if key is None and request.adapter not in self._by_key:  # requests from other engines have a key
                raise unknown(self._model.spec.name, request.adapter, self._names)
            block_length = self._by_key[key or request.adapter].block_length
        asked = request.diffusion
        if block_length and not asked.block_length and not self._model.spec.causal:
            request = replace(request, diffusion=replace(asked, block_length=block_length))
        return replace(request, adapter=key or request.adapter)

    def acquire(self, request: Request) -> None:
        """Keep the adapter of an admitted, resolved request for each of its samples until ``release``, even if it is
        replaced or dropped."""
        with self._lock:
            if (found := self._by_key.get(request.adapter)) is not None:
                self._waiting.update((each.id, found) for each in samples(request))

    def release(self, request: RequestId) -> None:
        """A request, or sample, has ended: release its adapter."""
        self._waiting.pop(request, None)

    @property
    def kept(self) -> int:
        """Number of requests and samples whose adapters are kept."""
        return len(self._waiting)

    def of(self, request: Request) -> Adapter | None:
        """The adapter of a resolved request; None if it uses none. Raises ``NotFound`` if it was dropped."""
        if not request.adapter:
            return None
        found = self._by_key.get(request.adapter) or self._waiting.get(request.id)
        if found is None:
            raise NotFound(f"the adapter {name_of(request.adapter)!r} was dropped while the request waited")
        return found

    @property
    def _own(self) -> Path | None:
        return self._model.adapters if isinstance(self._model, LoadedModel) else None

    def _find(self, name: str) -> Path:
        """The folder of adapter ``name``: the server's or, if there is none, the checkpoint's."""
        places = [Path(self._folder).expanduser()] if self._folder else []
        places += [self._own] if self._own is not None else []
        for place in places:
            if (place / name).is_dir():
                return place / name
        if not self._folder:
            raise NotFound(f"the checkpoint has no adapter {name!r}, and [engine] adapter_folder is not set")
        raise NotFound(f"[engine] adapter_folder has no folder {name!r}")

    def _taking(self) -> LoadedModel:
        if not isinstance(self._model, LoadedModel):
            raise Unimplemented(f"model {self._model.spec.name!r} takes no adapters: its network is its own")
        if not self._folder and self._own is None:
            raise no_folder()
        return self._model

    def _check_capacity(self, name: str, size: int) -> None:
        held = sum(a.bytes for a in self._by_key.values() if a.name != name)
        if held + size > self._most:
            raise ResourceExhausted(
                f"the adapters of {self._model.spec.name!r} would take {held + size} bytes, and [engine] adapter_bytes "
                f"is {self._most}: drop one, or set it higher"
            )


def check_adapters(model: Model, most: int) -> None:
    """Raise ``ConfigError`` where the adapters of a sketched model's checkpoint cannot be loaded in ``most`` bytes."""
    if isinstance(model, LoadedModel):
        try:
            Adapters(replace(model, device=torch.device("cpu")), most=most).load_own()
        except (InvalidArgument, ResourceExhausted) as error:
            raise ConfigError(str(error)) from error


def _check_block_length(spec: ModelSpec, length: int) -> None:
    """Raise ``ConfigError`` if an adapter's default block length (0 = none) is not one of the model."""
    if not length or spec.causal:
        return
    if spec.renoising is not None and length != spec.block_length():
        raise ConfigError(f"block_length of {GENERATION} must be {spec.block_length()}, the model's canvas")
    if spec.attention_block and spec.attention_block % length:
        raise ConfigError(f"block_length of {GENERATION} must divide {spec.attention_block}, the model's block length")


def key_of(info: AdapterInfo) -> str:
    """The key of an adapter: its name and a digest of its files."""
    return f"{info.name}:{info.digest}"


def name_of(key: str) -> str:
    """The name in an adapter's key."""
    return key.rpartition(":")[0]


def unknown(model: str, name: str, names: Iterable[str]) -> UnknownModel:
    """The error for a request with an unknown adapter ``name``; ``names``: those that ``model`` has."""
    known = ", ".join(sorted(names)) or "none is loaded"
    return UnknownModel(f"model {model!r} has no adapter {name!r}; there is: {known}")


def no_folder() -> Unimplemented:
    """The error if no folder for adapters is configured."""
    return Unimplemented("this server takes no adapters: it has no [engine] adapter_folder")


def _info(adapter: Adapter) -> AdapterInfo:
    return AdapterInfo(
        name=adapter.name,
        digest=adapter.key.rpartition(":")[2],
        rank=adapter.rank,
        bytes=adapter.bytes,
        block_length=adapter.block_length,
    )
