"""The import rules that keep the parts apart, checked on the sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mmserve"
KERNELS = ROOT / "kernels"

PROTOBUF = ("google.protobuf", "google.rpc", "grpc_status", "mmserve.v1")
POLICIES = ("prune", "kv/reduction", "kv/reuse", "decode/recompute", "decode/commit")
#: Files of a policy package that are not policies: the protocol, and the table of names.
SHARED = ("base.py", "__init__.py")

#: Packages and modules of mmserve from the lowest layer up: each imports its own layer and those below. The engine's
#: layer is the stages, their workers and the loop.
LAYERS = (
    ("errors",),
    ("core", "v1", "cores", "memory", "priority"),
    ("wire",),
    ("client",),
    ("tenants",),
    ("config",),
    ("prune", "schedule", "observe", "tools", "transfer", "tiers"),
    ("models",),
    ("kv",),
    ("constraint",),
    ("encode",),
    ("decode",),
    ("engine", "stages", "decoders", "capabilities", "defaults", "needs"),
    ("video",),
    ("rpc", "settle"),
    ("http",),
    ("assembly", "check"),
    ("cluster",),
    ("reference",),
    ("lines", "tune", "calibrate", "train_filter", "export"),
    ("bench", "plan", "cli", "__main__"),
)


def _module(path: Path) -> str:
    base = KERNELS if KERNELS in path.parents else ROOT
    parts = list(path.relative_to(base).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, source: str | None = None) -> tuple[str, ...]:
    """Every module that a file imports, at any depth, with relative imports resolved."""
    package, found = _module(path).split("."), list[str]()
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += (base, *(f"{base}.{alias.name}" for alias in node.names))
    return tuple(found)


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, f"{folder} holds no sources: the rule would be checked on nothing"
    return found


def _offences(files: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [f"{_module(f)} imports {m}" for f in files for m in imports(f) if _within(m, forbidden)]


def test_the_reader_of_imports_sees_every_form() -> None:
    source = (
        "import torch.nn\ndef f():\n    from grpc import aio\n    from . import plan\n    from ..kv.pool import P\n"
    )
    seen = set(imports(PACKAGE / "core" / "canvas.py", source))
    assert {"torch.nn", "grpc", "grpc.aio", "mmserve.core", "mmserve.core.plan", "mmserve.kv.pool"} <= seen
    assert _within("torch.nn", ("torch",))
    assert not _within("torchvision", ("torch",))


def test_no_layer_imports_a_higher_one() -> None:
    layer = {name: number for number, names in enumerate(LAYERS) for name in names}
    offences = set[str]()
    for path in _files(PACKAGE):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in layer, f"mmserve.{own} has no layer: put it into LAYERS"
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "mmserve" and len(parts) > 1 and layer.get(parts[1], -1) > layer[own]:
                offences.add(f"{_module(path)} imports mmserve.{parts[1]}")
    assert offences == set()


def test_the_parts_of_constraint_import_downwards_and_decode_knows_its_session_alone() -> None:
    parts = ("limits", "findings", "compile", "search", "session", "admission", "restored")
    offences = list[str]()
    for number, part in enumerate(parts):
        folder = PACKAGE / "constraint" / part
        above = tuple(f"mmserve.constraint.{other}" for other in parts[number + 1 :])
        offences += _offences(_files(folder) if folder.is_dir() else [folder.with_suffix(".py")], above)
    assert offences == []
    outer = {"mmserve.constraint", "mmserve.constraint.session"}
    known = ("mmserve.constraint.session.session", "mmserve.constraint.restored")  # a session, and its plain data
    for path in _files(PACKAGE / "decode"):
        inner = {m for m in imports(path) if _within(m, ("mmserve.constraint",)) and not _within(m, known)}
        assert inner <= outer, f"{_module(path)} imports {inner}"


def test_the_decode_loop_imports_few_modules() -> None:
    loop = ast.parse((PACKAGE / "decode" / "loop.py").read_text())
    own = {node.module for node in ast.walk(loop) if isinstance(node, ast.ImportFrom) and node.module is not None}
    own = {module for module in own if _within(module, ("mmserve",))}
    assert "mmserve.decode.state" in own, "the imports of the loop were not read"
    assert len(own) <= 14, f"the loop imports {len(own)} modules of mmserve: {sorted(own)}"


@pytest.mark.parametrize("folder", ["core", "schedule"])
def test_core_and_schedule_import_neither_torch_nor_grpc(folder: str) -> None:
    assert _offences(_files(PACKAGE / folder), ("torch", "grpc", "mmserve_kernels", "transformers")) == []


def test_the_client_imports_only_what_is_below_it() -> None:
    """Neither torch nor a package of the server, so that it can be installed alone."""
    below = ("errors", "core", "v1", "wire", "client")
    own = {m.split(".")[1] for f in _files(PACKAGE / "client") for m in imports(f) if m.startswith("mmserve.")}
    assert own <= set(below)
    for package in ("wire", "client"):
        assert _offences(_files(PACKAGE / package), ("torch", "transformers", "numpy", "mmserve_kernels")) == []


def test_core_and_schedule_reach_no_torch_through_their_own_imports() -> None:
    """What they import of mmserve keeps the rule too, so that no torch comes in by a detour."""
    pending = [*_files(PACKAGE / "core"), *_files(PACKAGE / "schedule")]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        assert _offences([path], ("torch", "grpc")) == []
        for module in imports(path):
            at = ROOT / Path(*module.split("."))
            if _within(module, ("mmserve",)):
                pending += [p for p in (at.with_suffix(".py"), at / "__init__.py") if p.is_file()]
    assert PACKAGE / "errors.py" in seen, "the walk followed no import"


def test_only_wire_the_fronts_the_client_and_v1_know_protobuf() -> None:
    allowed = tuple(PACKAGE / name for name in ("wire", "rpc", "http", "v1", "client"))
    others = [f for f in _files(PACKAGE) if not any(f == a or a in f.parents for a in allowed)]
    assert _offences(others, (*PROTOBUF, "google")) == []


def test_policies_never_import_one_another() -> None:
    checked = 0
    for folder in POLICIES:
        if not (PACKAGE / folder).is_dir():
            continue
        policies = [f for f in _files(PACKAGE / folder) if f.name not in SHARED]
        kinds = tuple("mmserve." + other.replace("/", ".") for other in POLICIES)
        bases = tuple(f"{kind}.base" for kind in kinds)
        for path in policies:
            others = {m for m in imports(path) if _within(m, kinds) and not _within(m, bases)}
            assert others == set(), f"{_module(path)} imports {others}"
            checked += 1
    assert checked >= 4


def test_the_kernels_never_import_mmserve() -> None:
    assert _offences(_files(KERNELS / "mmserve_kernels"), ("mmserve",)) == []


def test_no_init_lies_directly_in_kernels() -> None:
    assert (KERNELS / "mmserve_kernels" / "__init__.py").is_file()
    assert not (KERNELS / "__init__.py").exists(), "an importable `kernels` shadows a package that transformers imports"
