"""Compiling a kernel for a GPU that is not at hand, and what it would use there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Target:
    """A GPU: Triton's name of it, and shared memory (bytes) that one program may use."""

    name: str
    gpu: GPUTarget
    shared_limit: int


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024),
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
)


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is launched.

    ``types``: Triton's type of each run-time argument (``*bf16``, ``i32``, …), pointers taken as aligned to 16 bytes;
    ``constants``: the compile-time arguments. A kernel's module lists all that its tables allow as ``variants()``.
    """

    name: str
    function: JITFunction[Any]
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    backend: str | None = None  # ``cuda`` or ``hip``, or the name of a target; None = launched so on all
    fp_fusion: bool = True  # a product and a sum rounded once


@dataclass(frozen=True)
class Resources:
    """What a kernel uses: registers a thread (vector registers on AMD), bytes of shared memory, bytes spilled."""

    registers: int
    shared: int
    spilled: int


def compile_for(variant: Variant, target: Target) -> Resources:
    """What ``variant`` uses on ``target``, of which none is needed; Triton's own errors pass through.

    Triton checks neither shared memory nor spills: the caller does. Does not work in a process with
    ``TRITON_INTERPRET=1``.
    """
    made = compiled(variant, target)
    registers, spilled = (_nvidia if target.gpu.backend == "cuda" else _amd)(made.asm, target)
    return Resources(registers, made.metadata.shared, spilled)


def compiled(variant: Variant, target: Target) -> Any:
    """Triton's compiled kernel: its code in each language it went through is in ``asm``."""
    names = variant.function.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if variant.types.get(name, "").startswith("*")
    }
    return triton.compile(
        ASTSource(variant.function, signature, constants, aligned),
        target=target.gpu,
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "enable_fp_fusion": variant.fp_fusion,
        },
    )


def _nvidia(asm: Mapping[str, str], target: Target) -> tuple[int, int]:
    """Registers and spilled bytes as the bundled assembler reports them."""
    architecture = f"{target.name}a" if target.gpu.arch >= 90 else target.name
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(asm["ptx"])
        command = [_ptxas(), "-v", f"--gpu-name={architecture}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return max(map(int, re.findall(r"Used (\d+) registers", report))), sum(map(int, spills))


@cache
def _ptxas() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")


def _amd(asm: Mapping[str, str], _target: Target) -> tuple[int, int]:
    """Vector registers and spilled bytes (4 a register) as the code object's notes have them."""
    notes = {name: int(value) for name, value in re.findall(r"\.(\w+_count): +(\d+)", asm["amdgcn"])}
    return notes["vgpr_count"], 4 * (notes["vgpr_spill_count"] + notes["sgpr_spill_count"])
