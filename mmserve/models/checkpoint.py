"""Checkpoint directories: ``config.json`` and safetensors, one file or shards, read tensor by tensor."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmserve.errors import ConfigError
from mmserve.models.counts import check_counts
from mmserve.models.formats import Made, read_quantised
from mmserve.models.stretch import Stretch
from mmserve.models.tensor_parts import ExpertSlice, Part, Whole

ADAPTER = "adapter_config.json"
#: Default parameters of generation, of a checkpoint and of an adapter.
GENERATION = "generation_config.json"
#: The subfolder of a checkpoint that contains its adapters.
ADAPTERS = "adapters"
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
#: dtypes of served weights, by their names in configuration files.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: dtypes by their names in safetensors' headers, including those of quantised weights; other dtypes are not supported.
_STORED = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
#: Tensors that old checkpoints contain although they can be computed from the configuration.
COMPUTED = (".position_ids", ".inv_freq")
#: Maximum number of tensors that an error names.
_SHOWN = 10
_AS_IT_IS = Stretch()


@dataclass(frozen=True, kw_only=True)
class Target:
    """Dtype and device for loading a checkpoint; ``hub`` allows downloading referenced files from the Hugging Face
    hub."""

    name: str
    dtype: torch.dtype
    device: torch.device
    hub: bool = False


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ``ConfigError`` when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


class Weights:
    """The tensors of a directory's safetensors by name, opened lazily; records which were read.

    ``file``: the name of the file, if there is only one. ``config``: the checkpoint's; if it has a quantisation,
    weights are named as in an unquantised checkpoint, and ``form`` describes their format. Raises ``ConfigError`` if
    the directory has none, a shard is missing, or a file is not safetensors.
    """

    def __init__(self, folder: Path, file: str = WEIGHTS, config: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.read: set[str] = set()
        self.form = ""
        self._made: Mapping[str, Made] = {}
        self._last: tuple[str, Tensor] | None = None  # latest dequantised tensor: several parameters may be parts of it
        self._open: dict[str, Any] = {}
        index = folder / INDEX
        if index.is_file():
            self.source, self._files = index, _index(index)
        elif (folder / file).is_file():
            self.source = folder / file
            self._files = dict.fromkeys(self._file(file).keys(), file)
        else:
            raise ConfigError(f"{folder} has no safetensors: neither {file} nor {INDEX}")
        quantised = read_quantised(config, self) if config is not None else None
        if quantised is not None:
            self.form, self._made = quantised.form, quantised.made
            self.ignore(*quantised.unused)

    @classmethod
    def has(cls, folder: Path) -> bool:
        """Whether ``folder`` holds safetensors at all."""
        return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()

    def __contains__(self, name: str) -> bool:
        return name in self._made or name in self._files

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors, without those from which others are dequantised."""
        parts = {part for made in self._made.values() for part in made.parts}
        return (self._files.keys() - parts) | self._made.keys()

    @property
    def stored_names(self) -> Iterable[str]:
        """Names of all tensors in the files."""
        return self._files.keys()

    def header(self, name: str) -> Tensor:
        """Tensor ``name`` of the files on "meta": its shape and dtype."""
        return self._stored(name, torch.device("meta"))

    def stored(self, name: str) -> Tensor:
        """Tensor ``name`` as stored."""
        return self._stored(name, torch.device("cpu"))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that tensor ``name`` is stored in."""
        return self._whole(name, torch.device("meta")).dtype

    def shape(self, name: str) -> torch.Size:
        """The shape of tensor ``name``."""
        return self._whole(name, torch.device("meta")).shape

    def tensor(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy of tensor ``name``, checked to have ``shape``, as ``dtype`` on ``device``; not read for "meta".

        Raises ``ConfigError`` if it is missing, has another shape, or is not floating point (quantised).
        """
        stored = self._whole(name, device)
        if stored.shape != shape:
            raise ConfigError(
                f"{self._place(name)}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}"
            )
        if stored.dtype not in (*DTYPES.values(), torch.float64):
            raise ConfigError(
                f"{self._place(name)}: tensor {name} is {_name(stored.dtype)}; only plain floating-point weights "
                f"({', '.join(DTYPES)}) can be served"
            )
        self._mark(name)
        return stored.to(device=device, dtype=dtype, copy=True)

    def part(self, part: Part, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy of a tensor or of a part of one, of ``shape``; raises as ``tensor`` does."""
        if isinstance(part, str):
            return self.tensor(part, shape, dtype, device)
        if isinstance(part, ExpertSlice):
            transposed = self.shape(part.name) != part.whole(shape)
            size = torch.Size(part.whole(shape, transposed=transposed))
            made = self.tensor(part.name, size, dtype, torch.device("meta"))
            if device.type == "meta":
                return made.new_empty(shape)
            made_of = part.name in self._made
            header: Any = Whole(self._whole(part.name, torch.device("cpu"))) if made_of else self._slice(part.name)
            return part.of(header, shape).to(device=device, dtype=dtype, copy=True).contiguous()
        whole = self.tensor(part.name, torch.Size((part.total, *shape[1:])), dtype, device)
        return whole[part.start : part.start + shape[0]].clone()

    def fill(
        self,
        module: nn.Module,
        names: Mapping[str, Part],
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: tuple[str, ...] = (),
    ) -> None:
        """Fill every parameter of ``module`` (created on the meta device) with its tensor, frozen.

        ``names`` maps a parameter's name to its tensor's, or to rows of one; tied parameters are filled once.
        Parameters whose names end in one of ``exact`` are fp32, whatever ``dtype`` is.
        """
        filled: dict[int, nn.Parameter] = {}
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) not in filled:
                kind = torch.float32 if name.endswith(exact) else dtype
                tensor = self.part(names[name], parameter.shape, kind, device)
                filled[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, filled[id(parameter)])

    def ignore(self, *patterns: str) -> None:
        """Mark the tensors that match one of ``patterns`` (``*`` and ``?``) as read: they are not needed."""
        for pattern in patterns:
            for name in fnmatch.filter({*self._files, *self._made}, pattern):
                self._mark(name)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors are equal, as stored. If so, both are marked as read, otherwise only ``one``."""
        self._mark(one)
        first, second = (self._whole(name, torch.device("cpu")) for name in (one, other))
        equal = first.shape == second.shape and torch.equal(first, second)
        if equal:
            self._mark(other)
        return equal

    def check_all_read(self, prefixes: tuple[str, ...] = ("",)) -> None:
        """Raises ``ConfigError`` naming unread tensors under ``prefixes``: the model has a feature that is not
        implemented."""
        unread = sorted(
            n for n in self._files.keys() - self.read if n.startswith(prefixes) and not n.endswith(COMPUTED)
        )
        self.refuse(unread)

    def refuse(self, unused: Sequence[str]) -> None:
        """Raises ``ConfigError`` naming the ``unused`` tensors, if there are any."""
        if unused:
            shown = ", ".join(unused[:_SHOWN]) + (f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else "")
            raise ConfigError(
                f"{self.source}: {len(unused)} tensors are not used: {shown}. The model that they belong to is not "
                "implemented, or not what config.json describes; if it does not need them, name them in "
                "unused_tensors under [[models]]"
            )

    def _mark(self, name: str) -> None:
        """Mark a tensor, and those from which it is dequantised, as read."""
        self.read.add(name)
        if name in self._made:
            self.read.update(self._made[name].parts)

    def _place(self, name: str) -> Path:
        return self.folder / self._files[self._made[name].parts[0] if name in self._made else name]

    def _whole(self, name: str, device: torch.device) -> Tensor:
        """The tensor, dequantised if necessary; on "meta" only its shape and dtype."""
        made = self._made.get(name)
        if made is None:
            return self._stored(name, device)
        if device.type == "meta":
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        if self._last is None or self._last[0] != name:
            self._last = name, made.make(*map(self.stored, made.parts))
        return self._last[1]

    def _slice(self, name: str) -> Any:
        return self._file(self._files[name]).get_slice(name)

    def _stored(self, name: str, device: torch.device) -> Tensor:
        """The tensor as stored; on "meta" only its shape and dtype, from the file's header."""
        if name not in self._files:
            raise ConfigError(f"{self.source} has no tensor {name}")
        try:
            file = self._file(self._files[name])
            if device.type != "meta":
                return file.get_tensor(name)
            header = self._slice(name)
            return torch.empty(header.get_shape(), dtype=_STORED.get(header.get_dtype(), torch.int8), device=device)
        except SafetensorError as error:
            raise ConfigError(f"{self._place(name)} has no readable tensor {name}: {error}") from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise ConfigError(f"{self.source.name} names {file}, which {self.folder} does not have")
            try:
                self._open[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
        return self._open[file]


class Checkpoint:
    """A model directory: its ``config``, its generation settings and its ``weights``."""

    def __init__(self, folder: Path, config: dict[str, Any], weights: Weights, stretch: Stretch = _AS_IT_IS) -> None:
        self.folder, self.config, self.weights, self.stretch = folder, config, weights, stretch
        generation = folder / GENERATION
        self.generation = read_json(generation) if generation.is_file() else {}

    @classmethod
    def open(cls, folder: Path, stretch: Stretch = _AS_IT_IS) -> Self:
        """Open a directory without reading any weights; raises ``ConfigError`` naming what is missing.

        ``stretch``: extension of its maximum positions.
        """
        if not folder.is_dir():
            raise ConfigError(f"there is no model directory {folder}")
        if (folder / ADAPTER).is_file() and not Weights.has(folder):
            base = read_json(folder / ADAPTER).get("base_model_name_or_path")
            raise ConfigError(
                f"{folder} holds only an adapter ({ADAPTER}) of {base!r}, not a model: merge it into that model (peft: "
                "merge_and_unload, then save_pretrained with the tokenizer) and serve the merged folder"
            )
        config = read_json(folder / CONFIG)
        weights = Weights(folder, config=config)
        check_counts(config, folder / CONFIG, len(list(weights.stored_names)))
        return cls(folder, config, weights, stretch)

    def with_config(self, config: dict[str, Any]) -> Self:
        """The same directory, with another ``config``."""
        return type(self)(self.folder, config, self.weights, self.stretch)

    @property
    def architecture(self) -> str:
        """The configuration's ``model_type``."""
        architecture = self.config.get("model_type")
        if not isinstance(architecture, str):
            raise ConfigError(f"{self.folder / CONFIG} has no model_type")
        return architecture

    def dtype(self) -> torch.dtype:
        """The served dtype in the configuration, else the one that most tensors are stored in."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if named in DTYPES:
            return DTYPES[named]
        stored = Counter(self.weights.dtype(name) for name in self.weights.names)
        return next((dtype for dtype, _count in stored.most_common() if dtype in DTYPES.values()), torch.float32)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, shard_bytes: int | None = None
) -> None:
    """Write ``config.json`` and ``tensors`` into ``folder``, as one file or as shards of at most ``shard_bytes``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if room is not None and shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room = None if room is None else room - tensor.nbytes
    for stale in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        stale.unlink(missing_ok=True)
    if shard_bytes is None:
        _save(shards[0], folder / WEIGHTS)
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, folder / file)
        files |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, ending in a line break."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors creates a private temporary file


def _index(path: Path) -> dict[str, str]:
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ConfigError(f"{path} has no weight_map from tensor names to file names")
    return files


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
