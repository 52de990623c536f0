"""Measurement of the stages of one model on this machine, with the objects used by an engine's workers, a pass at a
time.

Passes of many sizes are run in turn, repeatedly, and the median for each size is used, so that temporary load does not
distort the curves. On a CPU with one thread a stage, CPU time of the thread is measured, which excludes other load
except for its effect on the core's speed. That effect is measured separately, by the same passes while other processes
run them on all other cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch

from mmserve.bench.measures import Progress
from mmserve.bench.settings import measured_config
from mmserve.config import Config
from mmserve.core.cancellation import Cancellation
from mmserve.core.encoded import Encoded
from mmserve.core.payloads import EncodedPayload
from mmserve.core.request import Diffusion, ImagePart, Message, Request, Sampling, Streaming, TextPart
from mmserve.encode.decoders import InPlace
from mmserve.errors import ConfigError, InvalidArgument
from mmserve.kv.pool import PagePool, pages_for
from mmserve.kv.table import PageTable
from mmserve.models.registry import load_model
from mmserve.needs import fitted
from mmserve.observe.machine import describe
from mmserve.plan.costs import Costs, Curve, Link
from mmserve.plan.fit import Fit, Sample, fit
from mmserve.plan.handover import handover_costs
from mmserve.plan.interference import Case, Neighbours, interference
from mmserve.plan.pictures import picture
from mmserve.plan.workload import Kind, Workload
from mmserve.stages import EncodedPrompt, Stages
from mmserve.tiers.caches import Caches
from mmserve.transfer.pipe import PipeTransport

#: Images of each request, requests of a batch, sentences of text, and side of the images (pixels).
CASES = (
    (0, 1, 1, 0),
    (0, 4, 1, 0),
    (0, 1, 24, 0),
    (1, 1, 1, 128),
    (1, 3, 1, 128),
    (2, 1, 1, 512),
    (2, 2, 1, 128),
    (4, 1, 1, 256),
    (8, 1, 1, 128),
    (1, 1, 1, 1536),
)
NEW_TOKENS = 12
_SENTENCE = "What is left of the circle? "
#: Repetitions for measuring transfers.
_SENDINGS = 15
_SENT = (1 << 16, 1 << 19, 1 << 21, 1 << 23)


@dataclass(frozen=True)
class Measured:
    """Costs, and the measured workload: each number of images, answered with the model's default policies."""

    costs: Costs
    workload: Workload


@dataclass
class Times:
    """Seconds of passes by their sums, for each stage."""

    by_stage: dict[str, dict[tuple[float, float], list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, stage: str, x: float, y: float, seconds: float) -> None:
        """Record a pass."""
        self.by_stage[stage][x, y].append(seconds)

    def fit(self, stage: str) -> Fit | None:
        """The curve of a stage, fitted to the medians; None without passes."""
        seen = self.by_stage.get(stage)
        return fit([Sample(x, y, statistics.median(each)) for (x, y), each in seen.items()]) if seen else None


class StageBench:
    """The stages of the one model of ``config``, run in the caller's thread."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = load_model(config.one_model("plan"))
        self.engine = fitted(config.engine, self.model, self.model.device)
        torch.set_num_threads(self.engine.torch_threads)
        cache, decoders = Caches.of(config.encoder_cache), InPlace(config.media)
        self.stages = Stages(self.model, self.engine, config.media, cache=cache, decoders=decoders)
        self.one_thread = self.model.device.type == "cpu" and self.engine.torch_threads == 1
        self.clock = time.thread_time if self.one_thread else self._finished
        self.clock_name = "CPU time" if self.one_thread else "wall time"
        self.info = self.stages.describe()
        self.pool = PagePool(self.engine.pages, unit=self.stages.shared_pages)
        self.times, self.crowded = Times(), Times()  # without other load, and with all other cores busy
        self.kinds: dict[int, list[Kind]] = defaultdict(list)
        self.cases: list[Case] = []  # that the model can run; empty before ``warm_up``
        self.rounds = 0  # so far
        self._numbers = count()

    def close(self) -> None:
        """Stop the stages' background threads."""
        self.stages.encoding.close()
        self.stages.decoders.close()

    def _finished(self) -> float:
        """Wall time (seconds) once the device has done all that was launched: encode returns earlier on a GPU, and its
        time would count as that of prefill."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def warm_up(self, progress: Progress) -> None:
        """Find the ``cases``, by running each of ``CASES`` once that ``fits``; prompts of models whose visual tokens
        depend on the image may still be too long.

        Raises ``ConfigError`` if there are none.
        """
        for case in CASES:
            if not self.fits(*case[:3]):
                continue
            try:
                self.run(*case, into=Times())
            except InvalidArgument as error:
                progress(f"left out: {case[0]} images of {case[3]} pixels a side: {error}")
            else:
                self.cases.append(case)
        if not self.cases:
            raise ConfigError(
                f"no request fits {self.info.name!r} with [engine] max_tokens {self.engine.max_tokens}: set it higher"
            )

    def request(self, images: int, sentences: int, side: int) -> Request:
        """A question with distinct images, decoded with the model's default policies."""
        number, pair = next(self._numbers), self.info.policies.default
        parts = [ImagePart(picture(100 * number + index, side)) for index in range(images)]
        return Request(
            id=f"plan-{number}",
            model=self.info.name,
            messages=(Message("user", (*parts, TextPart(_SENTENCE * sentences))),),
            sampling=Sampling(max_new_tokens=NEW_TOKENS),
            diffusion=Diffusion(recompute=pair.recompute, commit=pair.commit),
            streaming=Streaming(),
        )

    def fits(self, images: int, batch: int, sentences: int) -> bool:
        """Whether the engine would run such a batch in one pass."""
        prompt = images * self.info.visual_tokens_per_image + 8 * sentences + 16 + NEW_TOKENS
        together = batch * prompt <= max(prompt, self.engine.prefill_tokens * 2)
        return images <= self.info.max_images and prompt <= self.info.max_tokens and together

    def run(self, images: int, batch: int, sentences: int, side: int, *, into: Times | None = None) -> None:
        """Run one batch through all stages; its times are recorded in ``into``, by default in ``times``."""
        requests = [self.request(images, sentences, side) for _ in range(batch)]
        times = self.times if into is None else into
        for request in requests:
            begun = self.clock()
            _raised(self.stages.encoding.load([request], Cancellation()))
            if images:
                times.add("load", images * side * side / 1e6, 0.0, self.clock() - begun)
        begun = self.clock()
        try:
            prompts: list[EncodedPrompt] = _raised(self.stages.encoding.encode(requests))
        except InvalidArgument:
            for request in requests:
                self.stages.release(request.id)
            raise
        seconds = self.clock() - begun
        before = [prompt.usage.visual_tokens_before // max(1, images) for prompt in prompts]
        if images:
            each = [size for size in before for _ in range(images)]
            times.add("encode", float(sum(each)), float(sum(size * size for size in each)), seconds)
        tables = [self._pages(prompt) for prompt in prompts]
        self._prefill(requests, tables, prompts, times)
        passes, rows = self._decode(requests, prompts, times)
        for request, table, prompt, size in zip(requests, tables, prompts, before, strict=True):
            answer = self.stages.decoding.finished(request.id)
            self.stages.release(request.id)
            self.pool.release(table.ids)
            visual = prompt.usage.visual_tokens // max(1, images)
            ran = rows[request.id]
            whole = prompt.usage.prompt_tokens + NEW_TOKENS
            kind = Kind(
                images=images,
                patches=size,
                megapixels=side * side / 1e6,
                visual_tokens=visual,
                text_tokens=prompt.usage.prompt_tokens - images * visual,
                output_tokens=max(1, answer.completion_tokens),
                steps=max(passes[request.id], int(answer.completion_tokens > 1)),  # 0 = one for each token
                rows=0 if ran and min(ran) >= whole else max(1, round(statistics.mean(ran))) if ran else 1,
            )
            if times is self.times and sentences == 1:
                self.kinds[images].append(kind)

    def _pages(self, prompt: EncodedPrompt) -> PageTable:
        return PageTable.take(self.pool, pages_for(prompt.usage.prompt_tokens + NEW_TOKENS, self.engine.page_size), ())

    def _prefill(
        self, requests: Sequence[Request], tables: Sequence[PageTable], prompts: Sequence[EncodedPrompt], times: Times
    ) -> None:
        more = 0 if self.model.spec.causal else NEW_TOKENS
        left = [(r, t, p.usage.prompt_tokens + more, 0) for r, t, p in zip(requests, tables, prompts, strict=True)]
        while left:
            begun = self.clock()
            outcomes = _raised(self.stages.prefilling.prefill([(request, table) for request, table, _, _ in left]))
            seconds = self.clock() - begun
            ends = [whole if run is None else run for run, (_, _, whole, _) in zip(outcomes, left, strict=True)]
            x = sum(end - done for end, (_, _, _, done) in zip(ends, left, strict=True))
            y = sum(end**2 - done**2 for end, (_, _, _, done) in zip(ends, left, strict=True))
            times.add("prefill", float(x), float(y), seconds)
            going = zip(outcomes, left, strict=True)
            left = [(request, table, whole, run) for run, (request, table, whole, _) in going if run is not None]

    def _decode(
        self, requests: Sequence[Request], prompts: Sequence[EncodedPrompt], times: Times
    ) -> tuple[dict[str, int], dict[str, list[int]]]:
        """The number of passes of each request, and the rows of each pass."""
        long = {r.id: p.usage.prompt_tokens + NEW_TOKENS for r, p in zip(requests, prompts, strict=True)}
        due: dict[str, int] = {}  # rows of each request's next pass
        passes, rows = dict.fromkeys(long, 0), {name: list[int]() for name in long}
        left = list(requests)
        while left:
            begun = self.clock()
            stepped = _raised(self.stages.decoding.decode(left))
            seconds = self.clock() - begun
            ran = {name: due[name] for name in (request.id for request in left) if due.get(name)}
            if ran:
                times.add("decode", float(sum(long[name] for name in ran)), float(sum(ran.values())), seconds)
            for name, each in ran.items():
                passes[name] += 1
                rows[name].append(each)
            due = {request.id: step.rows or 0 for request, step in zip(left, stepped, strict=True)}
            left = [request for request, step in zip(left, stepped, strict=True) if step.reason is None]
        return passes, rows

    def sizes(self) -> tuple[float, float]:
        """Bytes of a visual token, and of a position's K/V, in serialized form."""
        store = None if self.model.spec.renoising is not None else self.stages.store
        keys = [] if store is None else store.keys
        kv = sum(2 * key[0, 0].numel() * key.element_size() for key in keys)
        return float(self._width if self.info.images else 0), float(kv)

    @property
    def _width(self) -> int:
        request = self.request(1, 1, 128)
        [encoded] = self.stages.encoder.encode([request])
        features = encoded.features
        return 0 if features is None else features[0].numel() * features.element_size()


def measure(arguments: argparse.Namespace, rounds: int, progress: Progress) -> Measured:
    """The costs of the model given by ``arguments``, on this machine, in ``rounds`` rounds after a warm-up round."""
    bench = StageBench(measured_config(arguments))
    try:
        return measured(bench, rounds, progress)
    finally:
        bench.close()


def measured(bench: StageBench, rounds: int, progress: Progress) -> Measured:
    """Run ``rounds`` more rounds of ``bench``; the costs from all of its rounds so far."""
    if not bench.cases:
        progress("warm-up")
        bench.warm_up(progress)
    cases = bench.cases
    with ExitStack() as stack:
        beside = stack.enter_context(Neighbours(bench.config, cases)) if bench.one_thread else None
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}: {len(cases)} batches")
            for case in cases:
                bench.run(*case)
            if beside is not None and beside.count:
                with beside.at_work():
                    for case in cases:
                        bench.run(*case, into=bench.crowded)
            bench.rounds += 1
    fits = {stage: bench.times.fit(stage) for stage in ("load", "encode", "prefill", "decode")}
    link, handover = _link(), handover_costs()
    curves = {stage: Curve() if one is None else one.curve for stage, one in fits.items()}
    embedding, kv = bench.sizes()
    costs = Costs(
        name=f"{bench.info.name} ({bench.info.dtype} on {bench.info.device})",
        source=f"mmserve plan --measure, medians of {bench.rounds} rounds, {bench.clock_name}",
        encode=curves["encode"],
        prefill=curves["prefill"],
        decode=curves["decode"],
        load=curves["load"],
        link=Link(link.curve.a, 1.0 / max(link.curve.b, 1e-15)),
        handover=handover.curve,
        interference=interference(bench.times.by_stage, bench.crowded.by_stage),
        embedding_bytes=embedding,
        kv_bytes=kv,
        chunked=bench.model.spec.causal,
        quality={
            **{stage: one.quality for stage, one in fits.items() if one is not None},
            "transfer": link.quality,
            "handover": handover.quality,
            **({"interference": {"rounds": float(bench.rounds)}} if bench.crowded.by_stage else {}),
        },
        machine=describe(),
    )
    kinds = tuple(_typical(each) for _images, each in sorted(bench.kinds.items()))
    return Measured(costs, Workload(f"measured: {bench.info.name}", kinds))


def _typical(kinds: Sequence[Kind]) -> Kind:
    """One kind for requests with the same number of images: the median of every count."""
    middle = {name: statistics.median(getattr(kind, name) for kind in kinds) for name in Kind.__dataclass_fields__}
    exact = {"weight", "megapixels"}
    return Kind(**{name: value if name in exact else round(value) for name, value in middle.items()})


def _link() -> Fit:
    """Cost of sending visual tokens through a pipe, serialized as between processes."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    sender, receiver = PipeTransport(sending, receives=False), PipeTransport(receiving, receives=True)
    seen: dict[int, list[float]] = defaultdict(list)
    for number in range(-1, _SENDINGS):
        for size in _SENT:
            features = torch.zeros(size // 4096, 1024)
            rows = np.arange(len(features))
            payload: Any = EncodedPayload(Encoded(rows, rows, features))
            begun = time.perf_counter()
            sender.send(f"{number}-{size}", payload)
            receiver.receive(f"{number}-{size}")
            if number >= 0:
                seen[size].append(time.perf_counter() - begun)
    sending.close()
    return fit([Sample(float(size), 0.0, statistics.median(each)) for size, each in seen.items()])


def _raised(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
