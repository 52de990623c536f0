"""llama.cpp's forward pass, by ctypes with the library of the ``xllamacpp`` wheel.

Only fields of its structures that have been stable for years are declared: the first numbers of a context's parameters,
and a batch. The rest is copied from the defaults of the library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np

from mmserve.errors import ConfigError

_F32, _F16 = 0, 1  # of ``enum ggml_type``
_MOST_BYTES = 2048  # an upper bound for parameter structures


class _Parameters(ctypes.Structure):
    """Parameters of a context: its first four numbers, then the remaining bytes unchanged."""

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("rest", ctypes.c_byte * (_MOST_BYTES - 16)),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def _compute_in_fp32(settings: _Parameters) -> None:
    """Use fp32 for the K/V cache and for attention: both default to fp16.

    The offsets of the three settings differ between versions; they are found by their default values: four enums that
    are -1, of which the last is that of flash attention; and two null pointers before the types of K and V.
    """
    data = bytes(settings)
    kinds, types = data.find(b"\xff" * 16, 16), struct.pack("<QQii", 0, 0, _F16, _F16)
    at = data.find(types, kinds)
    if kinds < 0 or at < 0:
        raise ConfigError("this version of llama.cpp keeps its settings in another order: it was not measured")
    ctypes.memmove(ctypes.addressof(settings) + kinds + 12, struct.pack("<i", 0), 4)
    ctypes.memmove(ctypes.addressof(settings) + at + 16, struct.pack("<ii", _F32, _F32), 8)


def library() -> Path | None:
    """The path of the wheel's library; None if it is not installed."""
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.so"), None)


class LlamaCpp:
    """A GGUF file loaded in llama.cpp, on a CPU, for rows of at most ``positions`` tokens; must be closed."""

    def __init__(self, path: Path, positions: int, *, causal: bool, threads: int) -> None:
        found = library()
        if found is None:
            raise ConfigError("xllamacpp is not installed")
        self._lib: Any = ctypes.CDLL(str(found))
        self._declare()
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._lib.llama_log_set(self._quiet, None)
        self._lib.llama_backend_init()
        parameters = self._lib.llama_model_default_params()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ConfigError(f"llama.cpp cannot load {path}")
        settings = self._lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = positions
        _compute_in_fp32(settings)
        self._context = self._lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ConfigError(f"llama.cpp makes no context of {positions} positions for {path}")
        self._lib.llama_set_n_threads(self._context, threads, threads)
        self._lib.llama_set_causal_attn(self._context, causal)
        self._vocabulary = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits (fp32 ``[n, V]``) of one row of tokens at positions 0 to n - 1, without cached K/V; a copy."""
        self.run(ids)
        flat = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (len(ids) * self._vocabulary,))
        return flat.reshape(len(ids), -1).copy()

    def run(self, ids: list[int]) -> None:
        """Run the pass without copying logits."""
        count = len(ids)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        row = ctypes.c_int32(0)
        rows = (ctypes.POINTER(ctypes.c_int32) * count)(*[ctypes.pointer(row)] * count)
        batch = _Batch(
            count,
            (ctypes.c_int32 * count)(*ids),
            None,
            (ctypes.c_int32 * count)(*range(count)),
            (ctypes.c_int32 * count)(*[1] * count),
            rows,
            (ctypes.c_int8 * count)(*[1] * count),
        )
        code = self._lib.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")

    def close(self) -> None:
        """Free the context and the model."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def _declare(self) -> None:
        pointer, lib = ctypes.c_void_p, self._lib
        lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = _Parameters
        lib.llama_model_load_from_file.argtypes = (ctypes.c_char_p, _Parameters)
        lib.llama_init_from_model.argtypes = (pointer, _Parameters)
        lib.llama_decode.argtypes = (pointer, _Batch)
        lib.llama_memory_clear.argtypes = (pointer, ctypes.c_bool)
        lib.llama_set_causal_attn.argtypes = (pointer, ctypes.c_bool)
        lib.llama_set_n_threads.argtypes = (pointer, ctypes.c_int32, ctypes.c_int32)
        lib.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        for name in (
            "llama_model_load_from_file",
            "llama_init_from_model",
            "llama_get_memory",
            "llama_model_get_vocab",
        ):
            getattr(lib, name).restype = pointer
        for name in ("llama_get_memory", "llama_get_logits", "llama_free", "llama_model_free", "llama_model_get_vocab"):
            getattr(lib, name).argtypes = (pointer,)
        lib.llama_vocab_n_tokens.argtypes = (pointer,)
