"""Names and folders of configured models, determined without loading them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmserve.config import BUNDLED, ModelConfig
from mmserve.errors import ConfigError

HUB = "hub:"
#: Models that are part of the package: their paths, names and folders in ``assets``.
SHIPPED = (BUNDLED, f"{BUNDLED}-causal")


def served_name(model: ModelConfig) -> str:
    """The name of ``model`` in requests."""
    if model.name:
        return model.name
    if model.path in SHIPPED:
        return model.path
    if model.path.startswith(HUB):
        return model.path.rpartition("/")[2].removeprefix(HUB)
    return Path(model.path).expanduser().resolve().name


def served_names(models: Sequence[ModelConfig]) -> tuple[str, ...]:
    """The names of ``models``, in order; raises ``ConfigError`` if two are equal."""
    names = tuple(map(served_name, models))
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"two models are named {name!r}; give one another name under [[models]]")
    return names


def local_folder(path: str) -> Path:
    """The directory of a model that is not on the hub; raises ``ConfigError`` if there is none."""
    if path in SHIPPED:
        return shipped_folder(path)
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no model directory {folder}; {' and '.join(SHIPPED)} come with mmserve, and {HUB}owner/name is "
            "downloaded"
        )
    return folder


def shipped_folder(path: str) -> Path:
    """The directory of a model of ``SHIPPED``; raises ``ConfigError`` if this installation does not have it."""
    folder = Path(__file__).parent.parent / "assets" / path
    if not (folder / "config.json").is_file():
        raise ConfigError(f"this copy of mmserve has no model {path!r}; name a checkpoint directory or hub:owner/name")
    return folder
