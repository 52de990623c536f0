"""The effect of sparse attention and of quantized K/V on logits and answers: ``mmserve bench attention``.

Each block selection is measured separately in prefill and in decode, and compared with random blocks and with dense
attention on the same generated items. Blocks have 16 positions: the default tasks' rows of the bundled models have 8 to
14 of them. ``oracle`` selects the blocks with the most attention mass: an upper bound for all builders.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmserve_kernels.sparse_attention import Rows
from torch import Tensor

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress
from mmserve.bench.plots import drawn
from mmserve.bench.resumed import Kept
from mmserve.bench.settings import measured_config, measured_policies, named_tasks
from mmserve.config import Config, EngineConfig, MediaConfig, resolve
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import DeepStack
from mmserve.core.request import Diffusion, ImagePart, Message, Part, Policy, Request, Sampling, TextPart, VideoPart
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.encode.embedding import embedded
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.sparse import DECODE, PREFILL, Sparse
from mmserve.kv.store import KVStore
from mmserve.models.base import CanvasModel, LoadedModel
from mmserve.models.registry import load_model
from mmserve.reference.evaluate import canvas, evaluate, item, media_files
from mmserve.reference.tasks import TASKS
from mmserve.tiers.keys import weights_digest

#: The columns that identify a row.
KEYS = ("measured", "stage", "density", "kept")
_BASELINES = {"random": "--", "oracle": ":"}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot distance of the logits and accuracy against density, a line a builder, for prefill and decode, as PNG."""
    with drawn(path, 9, 6.5) as figure:
        axes = figure.subplots(2, 2, sharex=True, sharey="row")
        dense = next(row["accuracy"] for row in rows if row["measured"] == "dense")
        for column, stage in enumerate(("prefill", "decode")):
            there = [row for row in rows if row.get("stage") == stage]
            for name in dict.fromkeys(row["measured"] for row in there):
                line = sorted((row for row in there if row["measured"] == name), key=lambda row: row["density"])
                style = {"color": "black"} if name in _BASELINES else {}
                for place, figure_of in enumerate(("nats", "accuracy")):
                    densities, made = [row["density"] for row in line], [row[figure_of] for row in line]
                    axes[place][column].plot(
                        densities, made, f"o{_BASELINES.get(name, '-')}", ms=4, label=name, **style
                    )
            axes[0][column].set(title=stage, yscale="log")
            axes[1][column].axhline(dense, color="#999999", linewidth=1)
            axes[1][column].set(xscale="log", xlabel="density", ylim=(0, 1.03))
            axes[0][column].legend(fontsize=8)
            densities = sorted({row["density"] for row in there})
            axes[1][column].set_xticks(densities, [f"{100 * density:g}%" for density in densities])
            axes[1][column].minorticks_off()
        axes[0][0].set_ylabel("nats from dense logits")
        axes[1][0].set_ylabel("accuracy (grey: dense)")


#: Tasks about two pictures, differences of two pictures, and a clip: the prompts with the most positions.
DEFAULT_TASKS = ("which", "differs", "order")
DENSITIES = (0.5, 0.25, 0.125)
PAGE = 16
#: Number of rows at the end of a next-token model's prompt whose logits are compared.
_LAST = 16


@dataclass(frozen=True)
class Variant:
    """One setting of the engine: its name in a row of results, and the keys of ``[engine]`` that it sets."""

    row: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, base: EngineConfig) -> EngineConfig:
        """``base`` with these keys set, and other keys of their kind at their defaults."""
        plain = {"sparse_prefill": "", "sparse_decode": "", "kv_bits": 0, "kv_kept": 0.0}
        return replace(base, page_size=PAGE, sparse_block=PAGE, prefix_cache=False, **{**plain, **self.keys})


@dataclass(frozen=True)
class Prompt:
    """Decoder inputs of an item: canvas, embeddings ``[N, D]``, and the rows whose logits are compared."""

    canvas: Canvas
    embeddings: Tensor
    rows: np.ndarray
    wanted: np.ndarray
    deep: DeepStack | None = None


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each variant: KL divergence of its logits from dense ones (nats), share of equal top-1 tokens, accuracy
    on ``--limit`` items of each task and, for block selections, the achieved density.

    Rows found in ``--resume`` are not measured again; raises ``ConfigError`` if they were measured with other
    settings.
    """
    tasks = named_tasks(arguments, TASKS, DEFAULT_TASKS)
    config = measured_config(arguments)
    model = load_model(config.models[0])
    if isinstance(model, CanvasModel):
        raise ConfigError(f"model {model.spec.name!r} has its own K/V cache, without a choice of attention")
    engine = resolve(config.engine)
    torch.set_num_threads(engine.torch_threads)
    prompts = list(_prompts(model, tasks, arguments.limit, arguments.seed, config.media))
    settings = {
        "model": model.spec.name,
        "weights": weights_digest(model.decoder).hex()[:12],
        "tasks": tasks,
        "items": arguments.limit * len(tasks),
        "seed": arguments.seed,
        "recompute": arguments.recompute,
        "commit": arguments.commit,
        **changed(config),
        "positions": round(statistics.mean(len(p.rows) for p in prompts), 1),
    }
    floor = row_floor(model)
    exact = [_logits(model, Variant({}).engine(engine), p, floor, decoding=False) for p in prompts]

    def measured(variant: Variant) -> Figures:
        wanted = variant.engine(config.engine)
        made = [_logits(model, wanted, p, floor, decoding=variant.row.get("stage") == "decode") for p in prompts]
        figures = _differences(exact, made)
        with BackgroundServer(replace(config, engine=wanted)) as server, server.client() as client:
            options = measured_policies(arguments, client.describe())
            asked = {"tasks": tasks, "limit": arguments.limit, "seed": arguments.seed, "options": options}
            answers = evaluate(server.address, **asked, progress=lambda _text: None)
        by_task = {row.task: row.accuracy for row in answers}
        accuracy = round(statistics.mean(by_task.values()), 4)
        share = _share(model, wanted, prompts)
        return {**variant.row, **share, **figures, "accuracy": accuracy, "accuracy_by_task": by_task}

    kept = Kept(arguments.resume, "attention", settings, KEYS)
    rows = []
    for variant in variants():
        rows.append(kept.row(variant.row) or kept.add(measured(variant)))
        progress(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    if arguments.plot is not None:
        plot(rows, arguments.plot)
        progress(f"wrote {arguments.plot}")
    return {"rows": rows, "settings": settings}


def variants() -> Iterator[Variant]:
    """Dense attention, every builder at every density, and K/V in 8 and 4 bits."""
    yield Variant({"measured": "dense"})
    for stage, builders in (("prefill", PREFILL), ("decode", DECODE)):
        for builder in builders:
            for density in DENSITIES:
                row = {"measured": builder, "stage": stage, "density": density}
                yield Variant(row, {f"sparse_{stage}": builder, "sparse_density": density})
    for bits in (8, 4):
        for kept in (0.0, 0.25):
            yield Variant({"measured": f"{bits} bits", "kept": kept}, {"kv_bits": bits, "kv_kept": kept})


def changed(config: Config) -> dict[str, dict[str, Any]]:
    """The non-default settings of ``config`` that affect the results: table → key → value.

    Keys that each variant sets itself are left out. Weights and their dtype are identified by their digest.
    """
    plain = Variant({})
    return {
        "engine": _other(plain.engine(config.engine), plain.engine(EngineConfig())),
        "media": _other(config.media, MediaConfig()),
        "schedulers": {s.name: [s.kind, dict(s.numbers)] for s in config.schedulers},
    }


def _other(given: EngineConfig | MediaConfig, default: EngineConfig | MediaConfig) -> Figures:
    return {name: value for name, value in vars(given).items() if value != vars(default)[name]}


def _prompts(model: LoadedModel, tasks: list[str], limit: int, seed: int, media: Any) -> Iterator[Prompt]:
    spec = model.spec
    encoder = Encoder(model, media, max_tokens=spec.max_tokens)
    for task in tasks:
        for index in range(limit):
            thing, question = item(task, index, seed)
            files = media_files(task, thing)
            media_parts: list[Part] = [*map(ImagePart, files["images"]), *map(VideoPart, files["videos"])]
            request = Request(
                id=f"{task} {index}",
                model=spec.name,
                messages=(Message("user", (*media_parts, TextPart(question.text))),),
                sampling=Sampling(max_new_tokens=canvas(task)),
                diffusion=Diffusion(recompute=Policy(name="none"), commit=Policy(name="low_confidence")),
            )
            [encoded] = encoder.encode([request])
            made = Canvas.create(
                encoded.ids,
                new_tokens=canvas(task),
                block_length=spec.block_length(),
                mask_id=spec.mask_id,
                places=encoded.places,
            )
            with torch.inference_mode():
                embeddings, deep = embedded(model, made.tokens, encoded)
            rows = np.arange(len(encoded.ids) if spec.causal else made.size)
            yield Prompt(made, embeddings, rows, rows[-_LAST:] if spec.causal else made.all_masked(), deep)


@torch.inference_mode()
def _logits(model: LoadedModel, engine: EngineConfig, p: Prompt, floor: int, *, decoding: bool) -> Tensor:
    """Logits ``[wanted, V]`` of prefill, or of a decode step that runs the wanted rows after a dense prefill."""
    pages = np.arange(-(-p.canvas.size // PAGE))
    room: dict[str, Any] = {"pages": len(pages), "page_size": PAGE, "dtype": model.dtype, "device": model.device}
    if engine.kv_bits:
        store: KVStore = QuantizedStore(model.decoder.config, **room, bits=engine.kv_bits, kept=engine.kv_kept)
    else:
        store = KVStore(model.decoder.config, **room)
    sparse = Sparse(model, store, engine) if engine.sparse_prefill or engine.sparse_decode else None
    stages = [(p.rows, sparse.prefill if sparse is not None else None)]
    if decoding and sparse is not None:
        stages.append((p.wanted, sparse.decode))
    made = torch.empty(0)
    for rows, selection in stages:
        one = Pass(p.canvas, pages, p.embeddings, rows, p.wanted, p.wanted, len(p.rows), p.deep)
        [found] = forward(model, store, [one], floor, sparse=sparse, selection=selection)
        made = found.whole()
    return made


def _share(model: LoadedModel, engine: EngineConfig, prompts: list[Prompt]) -> dict[str, float]:
    """The achieved density: the share of visible blocks selected by passes, averaged over prompts and layers.

    Empty if all blocks are selected. Densities are rounded up to whole blocks, and some layers are dense.
    """
    if not (engine.sparse_prefill or engine.sparse_decode):
        return {}
    c = model.decoder.config
    sparse = Sparse(model, KVStore(c, pages=1, page_size=PAGE, dtype=model.dtype, device=model.device), engine)
    selection = sparse.prefill or sparse.decode
    assert selection is not None
    dense = len(sparse.dense_layers(selection)) / c.num_layers
    shares = []
    for p in prompts:
        at = torch.from_numpy(p.rows if sparse.prefill else p.wanted)
        rows = Rows(at, len(p.rows), at + 1 if model.spec.causal else None, selection.row_block, selection.kv_block)
        visible = rows.visible()
        chosen = selection.mask(torch.ones(1, *visible.shape), rows)
        shares.append(float(chosen.sum() / visible.sum()))
    return {"share": round(dense + (1 - dense) * statistics.mean(shares), 3)}


def _differences(exact: list[Tensor], made: list[Tensor]) -> dict[str, float]:
    """Mean KL divergence of dense logits from these (nats), share of rows with the same top-1 token, and the largest
    change of a log-probability."""
    one, other = torch.cat(exact).log_softmax(-1), torch.cat(made).log_softmax(-1)
    divergence = (one.exp() * (one - other)).sum(-1).mean()
    same = (one.argmax(-1) == other.argmax(-1)).float().mean()
    largest = (one - other).abs().max()
    return {"nats": round(float(divergence), 5), "same_best": round(float(same), 4), "largest": float(f"{largest:.3g}")}
