"""A decode pass padded to a bucket over fixed buffers: the same hidden states, and nothing written outside scratch."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from graph_passes import BATCHES, MODELS, PAGE, PAGES, again, logits, near, passes, store_of
from harness import Bench
from helpers import ask, dkv, threshold, tiny_model
from mmserve_kernels.cached_attention import kernel as attention_kernel
from mmserve_kernels.commit_scores import reference
from mmserve_kernels.rope_scatter import kernel as rope_kernel
from quick_interpreter import quicken
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mmserve.decode.graphs
from mmserve.config import EngineConfig
from mmserve.core.constraint import ConstraintSpec, Regex
from mmserve.core.encoded import DeepStack
from mmserve.core.request import Policy, Request
from mmserve.decode.forward import row_floor
from mmserve.decode.graphs import MOST_ROWS, Bucket, CudaCapture, Graphs, Run, graphs_for, obstacle
from mmserve.decode.logits import padded_rows
from mmserve.kv.quantized import QuantizedStore
from mmserve.kv.sparse import Sparse
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.decoder import Decoder
from mmserve.models.moe import MoEConfig

Make = Callable[..., Bench]


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_a_padded_pass_is_the_pass_and_writes_nowhere_else(kind: str, text_model: LoadedModel) -> None:
    model = MODELS[kind](text_model)
    plain, fixed = store_of(model), store_of(model)
    graphs = Graphs(model, fixed, again)
    for store in (plain, fixed):
        logits(model, store, passes(model, [0, 1, 2, 3, 4, 5], None, 0))
    for seed, (batch, counts) in enumerate(BATCHES, 1):
        before = [pages.clone() for pages in (*fixed.keys, *fixed.values)]
        asked = passes(model, batch, counts, seed)
        wanted = logits(model, plain, asked)
        found = logits(model, fixed, asked, graphs)
        assert graphs.runs == seed
        assert near(found, wanted)
        written = {at for p in asked for at in (p.pages[p.rows // PAGE] * PAGE + p.rows % PAGE).tolist()}
        for was, now, theirs in zip(before, (*fixed.keys, *fixed.values), (*plain.keys, *plain.values), strict=True):
            pairs = [x[: fixed.scratch].flatten(0, 1).nan_to_num(7.0) for x in (was, now, theirs)]
            changed = (pairs[0] != pairs[1]).flatten(1).any(1).nonzero()[:, 0].tolist()
            assert set(changed) <= written and changed, "nothing but the rows' own places"
            assert near(pairs[1], pairs[2])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores run the Triton kernels, here in the interpreter."""
    quicken()
    first = KVStore.__init__

    def with_kernels(self: KVStore, *arguments: object, **options: object) -> None:
        first(self, *arguments, **options)  # type: ignore[arg-type]
        self._rope_scatter, self._cached_attention = rope_kernel.rope_scatter, attention_kernel.cached_attention

    monkeypatch.setattr(KVStore, "__init__", with_kernels)


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the CPU in the interpreter")
@torch.inference_mode()
def test_with_the_kernels_a_padded_pass_is_the_pass_bit_for_bit(text_model: LoadedModel) -> None:
    """Matrix products of ``row_floor`` rows or more, and attention by a row's own data: padding moves no bit."""
    model = MODELS["causal"](text_model)
    plain, fixed = store_of(model), store_of(model)
    graphs = Graphs(model, fixed, again)
    for one, other in zip((*plain.keys, *plain.values), (*fixed.keys, *fixed.values), strict=True):
        other[: fixed.scratch] = one[: plain.scratch].normal_(generator=torch.Generator().manual_seed(0))
    for seed, counts in ((1, [3, 6]), (2, [7, 3])):
        asked = passes(model, [0, 4], counts, seed)
        assert torch.equal(logits(model, fixed, asked, graphs), logits(model, plain, asked))
    assert graphs.runs == 2
    for one, other in zip((*plain.keys, *plain.values), (*fixed.keys, *fixed.values), strict=True):
        assert torch.equal(one[: plain.scratch], other[: fixed.scratch])


class HostConstants(TorchDispatchMode):
    """Counts the tensors that are made of numbers on the host, which a GPU has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@pytest.mark.parametrize("kind", MODELS)
def test_a_recorded_pass_asks_the_device_nothing(kind: str) -> None:
    """Run with tensors that have no contents: a branch on a number, a shape made of one, or a copy raises."""
    recorded: list[Run] = []

    def record(run: Run) -> Run:
        recorded.append(run)
        return run

    with FakeTensorMode(), torch.inference_mode():
        model = MODELS[kind](tiny_model(vision=False))
        store = KVStore(model.decoder.config, pages=PAGES, page_size=PAGE, dtype=model.dtype, device=model.device)
        Graphs(model, store, record)._graph(Bucket(16, 2, 4))
        with HostConstants() as host:
            assert recorded[0]().shape == (16, model.decoder.config.hidden_size)
            assert host.count == 0
            torch.tensor([1, 2])
            assert host.count == 1, "it would have been seen"
        with pytest.raises(DataDependentOutputException):
            (recorded[0]() > 0).any().item()


def ready(model: LoadedModel, capture: Callable[[Run], Run] = again) -> Graphs:
    return Graphs(model, store_of(model), capture)


def step(model: LoadedModel, graphs: Graphs, count: int, request: int = 3) -> Tensor:
    return logits(model, graphs._store, passes(model, [request], [count], 1), graphs)


@torch.inference_mode()
def test_each_size_is_recorded_once_over_empty_buffers(text_model: LoadedModel) -> None:
    recorded: list[Tensor] = []

    def record(run: Run) -> Run:
        recorded.append(run())
        return run

    graphs = ready(text_model, record)
    floor = padded_rows(1, row_floor(text_model))
    for count in (1, 2, floor, floor + 1, 1):
        step(text_model, graphs, count)
    assert graphs.buckets == (Bucket(2 * floor, 1, 16), Bucket(floor, 1, 16)), "of 100 positions in pages of 8"
    step(text_model, graphs, 1, request=0)
    assert graphs.buckets[-1] == Bucket(floor, 1, 4)
    assert graphs.runs == 6 and len(recorded) == 3
    rows, at = torch.zeros(floor, text_model.width), torch.zeros(floor, dtype=torch.int64)
    wanted = text_model.decoder(rows, at, lambda _layer, q, *_: torch.zeros_like(q))
    assert torch.equal(recorded[0], wanted)


@pytest.mark.parametrize(
    ("base", "sizes"), [(2, {1: 1, 2: 2, 3: 4, 8: 8, 9: 16}), (4, {1: 1, 2: 4, 4: 4, 5: 16, 65: 256})]
)
def test_sizes_are_powers(base: int, sizes: dict[int, int]) -> None:
    assert {size: mmserve.decode.graphs._power(base, size) for size in sizes} == sizes


@torch.inference_mode()
def test_their_number_is_bounded_and_those_used_last_stay(
    text_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmserve.decode.graphs, "MOST_GRAPHS", 2)
    graphs = ready(text_model)
    for count in (40, 17, 40, 100):
        assert step(text_model, graphs, count).shape[0] == count
    assert [bucket.rows for bucket in graphs.buckets] == [64, 128]
    assert graphs.runs == 4


@torch.inference_mode()
def test_large_passes_are_not_recorded(text_model: LoadedModel) -> None:
    graphs = ready(text_model)
    row = torch.zeros(MOST_ROWS + 8, text_model.width)
    layout = graphs._store.layout([np.arange(8)] * 65, [np.arange(1)] * 65, [8] * 65)
    assert graphs.run(row, torch.arange(len(row)), layout) is None
    assert graphs.buckets == ()


@torch.inference_mode()
def test_what_cannot_be_recorded_runs_all_the_same_and_is_tried_once(
    text_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Run] = []

    def fail_first(run: Run) -> Run:
        tried.append(run)
        if len(tried) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    graphs = ready(text_model, fail_first)
    with caplog.at_level(logging.WARNING, "mmserve.decode"):
        found = [step(text_model, graphs, count) for count in (5, 5)]
    assert len(tried) == 1 and (graphs.runs, graphs.failures) == (0, 1)
    assert graphs._store.kernels["decode_step"] == "eager"
    [line] = caplog.messages
    assert "cannot be captured" in line and line.endswith("not permitted when stream is capturing")
    wanted = logits(text_model, store_of(text_model), passes(text_model, [3], [5], 1))
    assert torch.equal(found[0].nan_to_num(7.0), wanted.nan_to_num(7.0))
    # Another size is another matter.
    step(text_model, graphs, 40)
    step(text_model, graphs, 5)
    assert len(tried) == 2 and (graphs.runs, graphs.failures) == (1, 1)
    assert graphs._store.kernels["decode_step"] == "cuda_graphs"


@torch.inference_mode()
def test_without_memory_for_its_buffers_a_pass_runs_as_ever(
    text_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(mmserve.decode.graphs, "_Buffers", full)
    graphs = ready(text_model)
    assert step(text_model, graphs, 5).shape[0] == 5
    assert (graphs.runs, graphs.failures) == (0, 1)


@torch.inference_mode()
def test_nothing_of_an_earlier_pass_is_left_in_the_buffers(text_model: LoadedModel) -> None:
    graphs, floor = ready(text_model), row_floor(text_model)
    for rows in (4 * floor - 3, 2 * floor + 1):
        layout = graphs._store.layout([np.arange(rows)], [np.arange(PAGES)], [rows])
        padded = -(-rows // floor) * floor
        graphs.run(torch.ones(padded, text_model.width), torch.arange(padded), layout)
    [(buffers, _run)] = graphs._graphs.values()
    for of_rows in (buffers.x_TD, buffers.cos, buffers.sin):
        assert of_rows[1:padded].flatten(1).any(1).all() and not of_rows[padded:].any() and len(of_rows) > padded
    batch = buffers.batch()
    assert batch.row_counts.tolist() == [rows]
    assert batch.kv_limit[:rows].all() and not batch.kv_limit[rows:].any()
    assert set((batch.slots[rows:] // PAGE).tolist()) == {PAGES}


# --- in the decoder ---


def requests_of(*recompute: Policy | None) -> list[Request]:
    return [
        ask(
            f"r{i}",
            f"two shapes {i}" * (1 + i % 3),
            max_new_tokens=[5, 12, 24][i % 3],
            recompute=recompute[i % len(recompute)],
            commit=[None, threshold(0.3)][i % 2],
            temperature=[0.0, 0.8][i // 3 % 2],
            seed=i,
        )
        for i in range(9)
    ]


def answers(b: Bench, requests: list[Request]) -> list[tuple[str, int, list[int]]]:
    gate = b.gate("encode")
    calls = b.submit(*requests)
    gate.open()
    return [(c.finished().text, c.finished().forwards, b.canvases[c.request.id][0].tolist()) for c in calls]


@pytest.mark.parametrize("kind", ["full", "causal", "three axes"])
def test_an_engine_with_graphs_gives_the_same_answers(kind: str, text_model: LoadedModel, bench: Make) -> None:
    model = MODELS[kind](text_model)
    requests = requests_of(Policy(name="last")) if kind == "causal" else requests_of(None, dkv(), dkv(3))
    plain = answers(bench(model), requests)
    b = bench(model)
    decoder = b.engine.stages.decoder
    assert decoder.parts.runner.graphs is None
    decoder.parts.runner.graphs = Graphs(model, decoder.parts.store, again)
    assert answers(b, requests) == plain
    assert decoder.parts.runner.graphs.runs >= max(forwards for _text, forwards, _canvas in plain) - 1


def test_tokens_drawn_from_counted_noise_are_the_same_in_any_batch(text_model: LoadedModel, bench: Make) -> None:
    """A decoder as on a GPU: graphs, and a sampler by ``commit_scores``, here the reference."""
    requests = requests_of(None, dkv(), dkv(3))
    regex = ConstraintSpec(Regex("(circle|square) [0-9]{1,3}"))
    requests[1] = dataclasses.replace(requests[1], constraint=regex)
    made = []
    for together in (True, False):
        b = bench(text_model)
        decoder = b.engine.stages.decoder
        decoder.parts.runner.graphs = Graphs(text_model, decoder.parts.store, again)
        decoder.parts.proposer.scores = reference.commit_scores
        made.append(answers(b, requests) if together else [answers(b, [r])[0] for r in requests])
    assert made[0] == made[1]
    assert made[0] != answers(bench(text_model), requests), "another noise than a CPU's"


@torch.inference_mode()
def test_passes_that_add_features_run_as_ever(text_model: LoadedModel) -> None:
    config = dataclasses.replace(text_model.decoder.config, deep_layers=1)
    decoder = Decoder(config)
    decoder.load_state_dict(text_model.decoder.state_dict())
    model = dataclasses.replace(text_model, decoder=decoder)
    [plain] = passes(model, [0], [4], 1)
    deep = dataclasses.replace(plain, deep=DeepStack(plain.rows[1:2], torch.ones(1, 1, config.hidden_size)))
    store = store_of(model)
    logits(model, store, passes(model, [0], None, 0))
    graphs = Graphs(model, store, again)
    found, wanted = logits(model, store, [deep], graphs), logits(model, store, [deep])
    assert graphs.runs == 0 and torch.equal(found, wanted)
    assert not near(wanted, logits(model, store, [plain], graphs)) and graphs.runs == 1


def test_passes_that_are_watched_run_as_ever(text_model: LoadedModel, bench: Make) -> None:
    model = MODELS["causal"](text_model)
    b = bench(model)
    decoder = b.engine.stages.decoder
    decoder.parts.runner.graphs = Graphs(model, decoder.parts.store, again)
    asked = ask("r", max_new_tokens=12, recompute=Policy(name="last"))
    b.ask(dataclasses.replace(asked, kv_reduction=Policy(name="heavy_hitters", options={"budget": 28})))
    assert decoder.parts.runner.graphs.runs == 0
    b.ask(dataclasses.replace(asked, id="other"))
    assert decoder.parts.runner.graphs.runs > 0


def elsewhere(model: LoadedModel, path: str = "triton") -> KVStore:
    """A store that says it is on a GPU."""
    store = KVStore(model.decoder.config, pages=4, page_size=16, dtype=model.dtype, device=model.device)
    store.device, store.kernels = torch.device("cuda"), dict.fromkeys(store.kernels, path)
    return store


def test_what_stands_in_the_way_is_named(text_model: LoadedModel) -> None:
    here = KVStore(text_model.decoder.config, pages=4, page_size=16, dtype=torch.float32, device=torch.device("cpu"))
    assert obstacle(text_model, here, "auto", None) == "they need a CUDA device, and the device is cpu"
    there = elsewhere(text_model)
    assert obstacle(text_model, there, "auto", None) == ""
    assert "'off'" in obstacle(text_model, there, "off", None)
    assert "runs as pytorch" in obstacle(text_model, elsewhere(text_model, "pytorch"), "auto", None)
    sparse = Sparse(text_model, here, EngineConfig(page_size=16, sparse_decode="quest"))
    assert "sparse" in obstacle(text_model, there, "auto", sparse)
    config = text_model.decoder.config
    sizes = {"pages": 4, "page_size": 16, "dtype": torch.float32, "device": torch.device("cpu")}
    quantized = QuantizedStore(config, **sizes, bits=8)
    quantized.device = torch.device("cuda")
    assert "kv_bits" in obstacle(text_model, quantized, "auto", None)
    experts = MoEConfig(experts=4, top_k=2, expert_size=16)
    decoder = Decoder(dataclasses.replace(config, moe=experts))
    assert "expert" in obstacle(dataclasses.replace(text_model, decoder=decoder), there, "auto", None)


def test_how_steps_run_is_told(text_model: LoadedModel, bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mmserve.decode"):
        told = bench(text_model, started=False).engine.stages.describe().kernels
    assert told["decode_step"] == "eager"
    assert "tiny: decode steps do not use CUDA graphs: they need a CUDA device" in caplog.text


on_a_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="graphs are recorded on a GPU: run with TRITON_INTERPRET=0",
)


@on_a_gpu
@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_a_recorded_pass_is_the_pass_that_was_recorded(kind: str) -> None:
    made = MODELS[kind](tiny_model(vision=False))
    model = dataclasses.replace(made, decoder=made.decoder.cuda(), device=torch.device("cuda"))
    stores = [store_of(model) for _ in range(3)]
    recorded = graphs_for(model, stores[0], "auto")
    assert recorded is not None and stores[0].kernels["decode_step"] == "cuda_graphs"
    for store in stores:
        logits(model, store, passes(model, [0, 1, 2, 3, 4, 5], None, 0))
    called = Graphs(model, stores[1], again)
    for seed, (batch, counts) in enumerate([*BATCHES, *BATCHES], 1):
        asked = passes(model, batch, counts, seed)
        found = logits(model, stores[0], asked, recorded)
        assert torch.equal(found, logits(model, stores[1], asked, called)), "the same work over the same buffers"
        assert near(found, logits(model, stores[2], asked))
        assert recorded.runs == called.runs == seed
    assert recorded.buckets == called.buckets and len(recorded.buckets) <= len(BATCHES), "each was run again"


@on_a_gpu
@torch.inference_mode()
def test_a_recording_that_breaks_off_leaves_the_others_whole() -> None:
    device = torch.device("cuda")
    capture = CudaCapture(device)
    x = torch.ones(8, 8, device=device)
    here = torch.cuda.current_stream()
    before = capture(lambda: x @ x)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            capture(lambda: x * float(x.sum()))  # asks the device
        assert torch.cuda.current_stream() == here
    after = capture(lambda: x + 1)
    torch.cuda.empty_cache()
    x.fill_(2.0)
    assert (before() == 32).all() and (after() == 3).all()
