"""Ahead-of-time compilation of a kernel for an absent GPU, and its resource usage there."""

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
    """A GPU: Triton's name for it, and the maximum shared memory of a program in bytes."""

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
    """One launch configuration of a kernel.

    ``types``: Triton's type of each run-time argument (``*bf16``, ``i32``, …), with pointers assumed to be aligned to
    16 bytes; ``constants``: the compile-time arguments. Each kernel module lists all variants permitted by its tables
    as ``variants()``.
    """

    name: str
    function: JITFunction[Any]
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    backend: str | None = None  # ``cuda``, ``hip`` or the name of a target; None = all
    fp_fusion: bool = True  # allow fused multiply-add


@dataclass(frozen=True)
class Resources:
    """Resource usage of a kernel: registers a thread (vector registers on AMD), bytes of shared memory, bytes
    spilled."""

    registers: int
    shared: int
    spilled: int


def compile_for(variant: Variant, target: Target) -> Resources:
    """The resource usage of ``variant`` on ``target``; no GPU is required. Raises Triton's compilation errors.

    Triton checks neither shared memory nor spills: the caller must. Does not work in a process with
    ``TRITON_INTERPRET=1``.
    """
    made = compiled(variant, target)
    registers, spilled = (_nvidia if target.gpu.backend == "cuda" else _amd)(made.asm, target)
    return Resources(registers, made.metadata.shared, spilled)


def compiled(variant: Variant, target: Target) -> Any:
    """Triton's compiled kernel; its ``asm`` has the code in each intermediate language."""
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
    """Registers and spilled bytes as reported by the bundled assembler."""
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
    """Vector registers and spilled bytes (4 a register) from the code object's notes."""
    notes = {name: int(value) for name, value in re.findall(r"\.(\w+_count): +(\d+)", asm["amdgcn"])}
    return notes["vgpr_count"], 4 * (notes["vgpr_spill_count"] + notes["sgpr_spill_count"])
