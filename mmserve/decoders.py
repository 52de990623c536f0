"""Creation of a model's decoder from the engine's settings: pages, CUDA graphs, sparse attention and draft model."""

from __future__ import annotations

from mmserve.capabilities import rows_apart
from mmserve.config import EngineConfig
from mmserve.decode.extensions.base import Extension
from mmserve.decode.extensions.decisions import Decisions
from mmserve.decode.extensions.draft_model import DraftModel
from mmserve.decode.extensions.eviction import KVEviction
from mmserve.decode.extensions.image_reuse.checks import no_reuse
from mmserve.decode.extensions.image_reuse.reuse import ImageKVReuse
from mmserve.decode.extensions.own_blocks import OwnBlocks
from mmserve.decode.extensions.self_draft import SelfDraft
from mmserve.decode.graphs import graphs_for
from mmserve.decode.loop import DiffusionDecoder
from mmserve.decode.parts import Parts
from mmserve.decode.policies import Offered
from mmserve.decode.uniform_state.decoder import UniformStateDecoder
from mmserve.errors import ConfigError
from mmserve.kv.capacity import check_capacity, free_bytes, pool_bytes
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.models.adapters import Adapters
from mmserve.models.base import CanvasModel, LoadedModel, Model
from mmserve.models.packed import pack
from mmserve.tiers.memory import TensorCache


def decoder_for(
    model: Model, engine: EngineConfig, offered: Offered, kv: TensorCache, adapters: Adapters | None = None
) -> DiffusionDecoder | UniformStateDecoder:
    """The decoder of ``model`` with its K/V pages; on a CPU this packs the model's weights.

    Raises ``ConfigError`` if the settings and the model are incompatible.
    """
    chosen = engine.sparse_prefill or engine.sparse_decode
    if isinstance(model, CanvasModel):
        if chosen or engine.kv_bits:
            raise ConfigError(f"model {model.spec.name!r} has its own K/V cache, without [engine] sparse_* or kv_bits")
        return UniformStateDecoder(model, offered)
    beside = model.companion
    for each in (model, beside):
        if each is not None:
            pack(each.decoder)
    if model.device.type == "cuda":
        _check_capacity([m for m in (model, beside) if m is not None], engine, kv.capacity)
    store, adapters = _store(model, engine), adapters or Adapters(model)
    extensions: list[Extension] = [KVEviction(model, store), ImageKVReuse(model, store, kv), Decisions(model)]
    if beside is not None:
        extensions.append(DraftModel(beside, _store(beside, engine), model))
    elif model.spec.draft_mask is not None and not chosen and not engine.kv_bits:
        extensions.append(SelfDraft(model, store, adapters.stacks))
    if model.spec.draft_mask is not None and not chosen and not engine.kv_bits:
        extensions.append(OwnBlocks(model, store, adapters.stacks))
    sparse = Sparse(model, store, engine) if chosen else None
    return DiffusionDecoder(
        Parts.of(
            model,
            store,
            extensions,
            chunk=engine.prefill_tokens,
            offered=offered,
            sparse=sparse,
            graphs=graphs_for(model, store, engine.cuda_graphs, sparse),
            runs_ahead=rows_apart(engine),
            adapters=adapters,
        )
    )


def _check_capacity(models: list[LoadedModel], engine: EngineConfig, kv_bytes: int) -> None:
    """Raise ``ConfigError`` if a GPU's memory is too small for the models' pages and the cache for ``image_reuse``."""
    first = models[0]
    whole = not (engine.sparse_prefill or engine.sparse_decode or engine.kv_bits)
    kept = 0 if no_reuse(first, reads_pages=whole) else kv_bytes
    pools = [pool_bytes(m.decoder.config, engine, m.dtype) for m in models]
    check_capacity(pools, kept, free_bytes(first.device), first.device)


def _store(model: LoadedModel, engine: EngineConfig) -> KVStore:
    """A K/V store with the engine's pages; page ids of a request are valid in the store of each of its models."""
    config, pages, page = model.decoder.config, engine.pages, engine.page_size
    if not engine.kv_bits:
        return KVStore(config, pages=pages, page_size=page, dtype=model.dtype, device=model.device)
    return QuantizedStore(
        config,
        pages=pages,
        page_size=page,
        dtype=model.dtype,
        device=model.device,
        bits=engine.kv_bits,
        kept=engine.kv_kept,
    )
