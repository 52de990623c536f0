"""Loads a model from its configuration: finds its files, and the loader of its architecture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from mmserve.config import ModelConfig
from mmserve.errors import ConfigError
from mmserve.models.base import LoadedModel, Model
from mmserve.models.calibration import load_calibration
from mmserve.models.checkpoint import ADAPTERS, CONFIG, DTYPES, Checkpoint, Target
from mmserve.models.commit_filter import load_filter
from mmserve.models.companion import accompany
from mmserve.models.names import HUB, local_folder, served_name
from mmserve.models.policy_file import NO_FILE, PolicyFile, load_policies
from mmserve.models.quantized import MADE, quantize, why_not
from mmserve.models.stretch import Stretch
from mmserve.models.switches import TEXT, check_class

_log = logging.getLogger(__name__)

#: Loader modules, with ``load(checkpoint, target)``, by the ``model_type`` of ``config.json``.
LOADERS = {
    "Dream": "mmserve.models.dream",
    "Fast_dLLM_Qwen": "mmserve.models.fast_dllm",
    "diffusion_gemma": "mmserve.models.diffusion_gemma",
    "diffusionvl_qwenvl": "mmserve.models.diffusionvl",
    "dimple": "mmserve.models.dimple",
    "fast_dvlm": "mmserve.models.fast_dvlm",
    "gemma3": "mmserve.models.gemma3",
    "idefics3": "mmserve.models.smolvlm",
    "internvl": "mmserve.models.internvl",
    "internvl_chat": "mmserve.models.internvl_chat",
    "llada": "mmserve.models.llada",
    "llada2_moe": "mmserve.models.block_diffusion",
    "llama": "mmserve.models.llama",
    "llava": "mmserve.models.llava",
    "llava_dream": "mmserve.models.lavida",
    "llava_llada": "mmserve.models.llada",
    "llava_llama": "mmserve.models.llama",
    "llava_next": "mmserve.models.llava",
    "llava_next_video": "mmserve.models.llava",
    "llava_onevision": "mmserve.models.llava",
    "mistral": "mmserve.models.llama",
    "mistral3": "mmserve.models.mistral3",
    "mmada": "mmserve.models.mmada",
    "qwen2": "mmserve.models.llama",
    "qwen2_5_vl": "mmserve.models.qwen_vl",
    "qwen2_vl": "mmserve.models.qwen_vl",
    "qwen3": "mmserve.models.llama",
    "qwen3_vl": "mmserve.models.qwen_vl",
    "qwen3_vl_moe": "mmserve.models.qwen_vl",
    "sdar": "mmserve.models.block_diffusion",
    "sdar_v": "mmserve.models.sdar_vl",
    "smolvlm": "mmserve.models.smolvlm",
    **TEXT,
}
#: The same by a class in ``architectures``, where two models have the same ``model_type``.
CLASSES = {
    "LLaDAMoEModelLM": "mmserve.models.llada_moe",
    "LlavaLladaForMaskedDiffusion": "mmserve.models.lavida",
}


#: Errors for values of a wrong type or range.
_WRONG = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def load_model(config: ModelConfig) -> Model:
    """Load the model of ``config``, and its companion, in eval mode with frozen weights.

    Only ``hub:owner/name`` may use the network. Raises ``ConfigError`` naming what is wrong and what is accepted.
    """
    return _load(config, resolve_device(config.device))


def sketch_model(config: ModelConfig) -> Model:
    """The model that ``load_model`` would load, without weights: on "meta", from the headers of its files.

    Weights that are quantised at load time are not quantised here. Raises ``ConfigError``.
    """
    return _load(config, torch.device("meta"), resolve_device(config.device))


def _load(config: ModelConfig, device: torch.device, intended: torch.device | None = None) -> Model:
    """The model on ``device``, in the dtype for the ``intended`` device (default: the same)."""
    intended = intended or device
    folder = _locate(config.path)
    checkpoint = Checkpoint.open(folder, Stretch(config.positions, config.rope_scaling))
    checkpoint.weights.ignore(*config.unused_tensors)
    load = loader(checkpoint)
    target = Target(
        name=served_name(config),
        dtype=_resolve_dtype(config.dtype, checkpoint, intended),
        device=device,
        hub=config.path.startswith(HUB),
    )
    with _readable(folder):
        loaded = load(checkpoint, target)
        if loaded.vision is not None:
            from mmserve.models.trial import try_image  # pillow

            try_image(loaded.vision, folder)
    model = replace(loaded, policies=_policies(config, folder))
    if config.dtype in MADE:
        _quantize(model, config.dtype)
    if isinstance(model, LoadedModel):
        stored = checkpoint.weights.form
        model = replace(
            model,
            commit_filter=load_filter(folder),
            calibration=load_calibration(folder),
            stored=stored,
            adapters=adapters if (adapters := folder / ADAPTERS).is_dir() else None,
        )
    if not config.companion:
        return model
    return accompany(model, _load(ModelConfig(path=config.companion, dtype=config.dtype), device, intended))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Errors of transformers and PyTorch for values in the files of ``folder`` that they cannot use, as
    ``ConfigError``s."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except _WRONG as error:
        _log.debug("%s cannot be loaded", folder, exc_info=True)
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{folder} cannot be loaded, a value in its files may be wrong: {why}") from error


def _quantize(model: Model, kind: str) -> None:
    """Quantise the weights of the decoder; raises ``ConfigError`` if that is not supported."""
    if not isinstance(model, LoadedModel):
        raise ConfigError(f"dtype {kind!r}: weights of {model.spec.architecture!r} are not quantised")
    if model.device.type == "meta":
        return
    if reason := why_not(model.device, kind):
        raise ConfigError(f"dtype {kind!r} is not available: {reason}")
    quantize(model.decoder, kind)


def _policies(config: ModelConfig, folder: Path) -> PolicyFile | None:
    if config.policies == NO_FILE:
        return None
    return load_policies(
        Path(config.policies).expanduser() if config.policies else folder, required=bool(config.policies)
    )


def model_folder(path: str) -> Path:
    """The checkpoint directory of a configuration's ``path``; raises ``ConfigError``."""
    return _locate(path)


def loader(checkpoint: Checkpoint) -> Callable[[Checkpoint, Target], Model]:
    """The function that loads ``checkpoint``; raises ``ConfigError`` naming the known architectures."""
    architecture = checkpoint.architecture
    classes = checkpoint.config.get("architectures")
    named = [CLASSES[name] for name in CLASSES if isinstance(classes, list) and name in classes]
    if architecture not in LOADERS:
        raise ConfigError(
            f"{checkpoint.folder / 'config.json'}: unknown model_type {architecture!r}; known are {sorted(LOADERS)}"
        )
    check_class(architecture, checkpoint.config, checkpoint.folder / CONFIG)
    function: Callable[[Checkpoint, Target], Model] = import_module(named[0] if named else LOADERS[architecture]).load
    return function


def resolve_device(device: str) -> torch.device:
    """The device ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; raises ``ConfigError`` if it is not available."""
    available = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda:0" if available else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not known; it can be 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda" or not available or (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f'device {device!r} is not available here: set device = "auto" or "cpu"')
    return resolved


def _resolve_dtype(dtype: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint.dtype()
    if dtype in MADE:  # only of weights; others are fp32
        return torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; it can be 'auto', {', '.join(map(repr, (*DTYPES, *MADE)))}")
    return DTYPES[dtype]


def _locate(path: str) -> Path:
    if not path.startswith(HUB):
        return local_folder(path)
    # Imported here: no other part of loading may use the network.
    from mmserve.models.towers import download

    return download(path.removeprefix(HUB))
