"""The effect of reusing an image's K/V, computed for it alone, on logits, answers and times: ``mmserve bench reuse``.

Every rule at every share answers the same generated items, in turns with plain prefill: pairs of pictures, and
questions about one picture both before and after it, so that no evaluated picture is at the start of its chat. All
pictures are cached: the tower does not run for either side, and each image's K/V are present. Also the same for prompts
of many pictures, which the bundled models cannot answer, but which show the times of prefill. Logits are those of the
correct answer's tokens, each after the preceding ones; for a masked diffusion model, those of its first pass, with the
whole answer masked.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmserve.assembly import BackgroundServer
from mmserve.bench.measures import Figures, Progress, share_by_task
from mmserve.bench.settings import measured_config, measured_policies, named_tasks
from mmserve.client import Blend, Client, KvShare, LegoLink, Options, RandomReuse, Result
from mmserve.config import EncoderCacheConfig, MediaConfig, resolve
from mmserve.core.canvas import Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.policies.image_reuse import ImageReuse
from mmserve.core.request import ImagePart, Message, Part, Policy, Request, Sampling, TextPart
from mmserve.decode.extensions.image_reuse.checks import no_reuse
from mmserve.decode.extensions.image_reuse.reuse import ImageKVReuse, run_to_completion
from mmserve.decode.extensions.image_reuse.selective import RowWatcher, SelectiveRecompute
from mmserve.decode.forward import Pass, forward, row_floor
from mmserve.encode.embedding import embedded
from mmserve.encode.encoder import Encoder
from mmserve.errors import ConfigError
from mmserve.kv.pool import pages_for
from mmserve.kv.reuse import reuse_of
from mmserve.kv.store import KVStore
from mmserve.models.base import LoadedModel
from mmserve.models.registry import load_model
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.images import SHORT_TASKS
from mmserve.reference.items import Question
from mmserve.reference.scenes import draw_scene, png
from mmserve.reference.tasks import TASKS, correct
from mmserve.tiers.memory import TensorCache

DEFAULT_TASKS = ("which", "differs", *SHORT_TASKS)
SHARES = (0.05, 0.15, 0.3)
LAYERS = (2, 4)
#: Pictures of a long prompt, and the number of long prompts.
MANY, LONG_PROMPTS = 8, 5
_PAGE = 16
#: Bytes of the cache of image K/V while logits are compared: enough for all.
_ALL = 1 << 40


@dataclass(frozen=True)
class Setting:
    """A rule and its share, in the forms of a client and of a request; no name = plain prefill."""

    name: str = ""
    reuse: ImageReuse | None = None

    @property
    def row(self) -> Figures:
        """The first columns of its row."""
        numbers = {"share" if name == "recompute" else name: value for name, value in self._numbers.items()}
        return {"measured": self.name or "plain", **numbers}

    @property
    def policy(self) -> Policy | None:
        """The policy of a core request; None = plain prefill."""
        return None if self.reuse is None else Policy(name=self.name, options=self._numbers)

    @property
    def _numbers(self) -> Figures:
        return {} if self.reuse is None else asdict(self.reuse)


@dataclass(frozen=True)
class Item:
    """A question as a chat message, and its canvas length (tokens)."""

    question: Question
    message: Message
    new_tokens: int


def run(arguments: argparse.Namespace, progress: Progress) -> Figures:
    """A row for each rule and share: KL divergence of its logits from plain ones on the correct answer (nats a token),
    and accuracy, rows run and times (medians, milliseconds) on ``--limit`` items of each task."""
    pictured = [task for task, kind in TASKS.items() if kind in ("image", "json", "pair")]
    tasks = named_tasks(arguments, pictured, DEFAULT_TASKS)
    config = replace(measured_config(arguments), encoder_cache=EncoderCacheConfig(kv_bytes=_ALL))
    model = load_model(config.models[0])
    if not isinstance(model, LoadedModel) or (lacking := no_reuse(model, reads_pages=True)):
        raise ConfigError(f"{model.spec.name} has no image_reuse: {lacking}")
    torch.set_num_threads(resolve(config.engine).torch_threads)
    items = [_item(task, index, arguments.seed) for index in range(arguments.limit) for task in tasks]
    chosen = list(settings())
    logits = _Logits(model, config.media)
    distances: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in chosen}
    for one in items:
        exact = logits.of(one, chosen[0])
        for setting in chosen:
            distances[setting].append(_distance(exact, logits.of(one, setting)))
    progress(f"logits of {len(items)} items compared")
    answers: dict[Setting, list[Result]] = {setting: [] for setting in chosen}
    times: dict[Setting, list[float]] = {setting: [] for setting in chosen}
    with BackgroundServer(config) as server, server.client(600) as client:
        decoding = measured_policies(arguments, client.describe())
        # creates the K/V that the others reuse
        cold = [_ask(client, one, Blend(0.0), decoding).times.prefill for one in items]
        for i, one in enumerate(items):
            progress(f"{i} of {len(items)} items, {len(chosen)} times each")
            for setting in chosen:
                answers[setting].append(_ask(client, one, setting.reuse, decoding))
        for one in _long(arguments.seed):
            _ask(client, one, Blend(0.0), decoding)
            for setting in chosen:
                times[setting].append(_ask(client, one, setting.reuse, decoding).times.first_token)
    asked = [one.question for one in items]
    rows = [
        {
            **setting.row,
            **_logit_figures(distances[setting]),
            **_answer_figures(asked, answers[setting], answers[chosen[0]]),
            **_long_figures(times[setting], times[chosen[0]]),
        }
        for setting in chosen
    ]
    return {
        "rows": rows,
        "cold_prefill_ms": round(statistics.median(cold), 2),
        "settings": {
            "model": model.spec.name,
            "tasks": tasks,
            "items": len(items),
            **decoding,
            "seed": arguments.seed,
            "pictures_of_long_prompts": MANY,
            "long_prompts": LONG_PROMPTS,
            "prefix_cache": False,
            "torch_threads": resolve(config.engine).torch_threads,
        },
    }


def settings() -> Iterator[Setting]:
    """Plain prefill, full reuse, every rule at every share, and full recompute."""
    yield Setting()
    yield Setting("blend", Blend(0.0))
    for share in SHARES:
        for layers in LAYERS:
            yield Setting("blend", Blend(share, layers))
            yield Setting("kv_share", KvShare(share, layers))
        yield Setting("kv_share", KvShare(share, each_step=0))
        yield Setting("lego_link", LegoLink(share))
        yield Setting("random_reuse", RandomReuse(share))
    yield Setting("blend", Blend(1.0))


def _item(task: str, index: int, seed: int) -> Item:
    thing, question = item(task, index, seed)
    pictures: list[Part] = [ImagePart(data) for data in media_files(task, thing)["images"]]
    parts = [*pictures, TextPart(question.text)]
    if len(pictures) == 1:
        parts.insert(0, TextPart(f"{question.text}\n"))
    return Item(question, Message("user", tuple(parts)), canvas(task))


def _long(seed: int) -> Iterator[Item]:
    """Prompts of many pictures after a line of text; one token is requested."""
    rng = random.Random(seed)
    for _ in range(LONG_PROMPTS):
        pictures = [ImagePart(png(draw_scene(rng).picture)) for _ in range(MANY)]
        question = Question("", "Which of these pictures show a circle?", "")
        yield Item(question, Message("user", (TextPart("Look.\n"), *pictures, TextPart(question.text))), 1)


def _ask(client: Client, one: Item, reuse: ImageReuse | None, decoding: Options) -> Result:
    options: Options = {"max_new_tokens": one.new_tokens, "image_reuse": reuse, **decoding}
    return client.generate([one.message], **options)


class _Logits:
    """Computes logits of correct answers after their prompts."""

    def __init__(self, model: LoadedModel, media: MediaConfig) -> None:
        self._model, self._floor = model, row_floor(model)
        self._encoder = Encoder(model, media, max_tokens=model.spec.max_tokens)
        pages, config = pages_for(model.spec.max_tokens, _PAGE), model.decoder.config
        self._store = KVStore(config, pages=pages, page_size=_PAGE, dtype=model.dtype, device=model.device)
        self._reuse = ImageKVReuse(model, self._store, TensorCache(_ALL))
        self._watcher = RowWatcher(self._store, model.dtype)

    @torch.inference_mode()
    def of(self, one: Item, setting: Setting) -> Tensor:
        """``[answer + 1, V]``: the logits of each token of the correct answer, and of its end if the canvas is long
        enough."""
        model, spec = self._model, self._model.spec
        request = Request(
            id="logits",
            model=spec.name,
            messages=(one.message,),
            sampling=Sampling(max_new_tokens=one.new_tokens),
            image_reuse=setting.policy,
        )
        [prompt] = self._encoder.encode([request])
        answer = np.asarray(model.tokenizer.encode(one.question.answer, add_special_tokens=False), dtype=np.int64)
        encoded, masked = (_followed_by(prompt, answer), 1) if spec.causal else (prompt, one.new_tokens)
        made = Canvas.create(
            encoded.ids,
            new_tokens=masked,
            block_length=spec.block_length(),
            mask_id=spec.mask_id,
            places=encoded.places,
        )
        pages = np.arange(pages_for(made.size, _PAGE))
        embeddings, deep = embedded(model, made.tokens, encoded)
        size = len(encoded.ids) if spec.causal else made.size
        first, selective = len(prompt.ids) - spec.logit_shift, None
        rows, wanted = np.arange(size), np.arange(first, min(first + len(answer) + 1, size))
        if (reuse := reuse_of(request)) is not None:
            prompt = replace(prompt, span_keys=self._reuse.keys(prompt))
            reused = run_to_completion(self._reuse.make(reuse, prompt, made, embeddings, deep, pages))
            rows, selective = rows[~reused.positions[:size]], reused.selective

        def run(rows: np.ndarray, wanted: np.ndarray, selective: SelectiveRecompute | None = None) -> Tensor:
            visible = int(wanted[-1]) + 1 if spec.causal else size
            sees = np.full(len(wanted), visible)
            seen = None if selective is None else self._watcher.watch(selective, rows, wanted, sees, pages)
            one_pass = Pass(made, pages, embeddings, rows, wanted, wanted, visible, deep, observation=seen)
            [found] = forward(model, self._store, [one_pass], self._floor)
            if selective is not None and seen is not None:
                selective.absorb(seen)
            return found.whole()

        if selective is None or not spec.causal:
            return run(rows, wanted).log_softmax(-1)
        found = [run(rows[rows <= first], wanted[:1])]  # as in decode: positions are recomputed with each token
        found += [run(np.union1d(selective.rows(), [at]), np.array([at]), selective) for at in wanted[1:]]
        return torch.cat(found).log_softmax(-1)


def _followed_by(prompt: Encoded, answer: np.ndarray) -> Encoded:
    places = prompt.places
    if places is not None:
        places = np.concatenate([places[..., :-1], places[..., -1:] + np.arange(len(answer) + 1)], axis=-1)
    return replace(prompt, ids=np.concatenate([prompt.ids, answer]), places=places)


def _distance(exact: Tensor, made: Tensor) -> tuple[float, float]:
    """Mean KL divergence of the exact distributions from these (nats), and the share of rows with the same top-1
    token."""
    divergence = (exact.exp() * (exact - made)).sum(-1).mean()
    return float(divergence), float((exact.argmax(-1) == made.argmax(-1)).float().mean())


def _logit_figures(distances: Sequence[tuple[float, float]]) -> dict[str, float]:
    nats, same = zip(*distances, strict=True)
    return {"nats": round(statistics.mean(nats), 5), "same_best": round(statistics.mean(same), 4)}


def _answer_figures(asked: Sequence[Question], answers: Sequence[Result], plain: Sequence[Result]) -> Figures:
    right = [(question.task, correct(question, r.text)) for question, r in zip(asked, answers, strict=True)]
    pairs = list(zip(plain, answers, strict=True))
    return {
        "accuracy": round(statistics.mean(hit for _task, hit in right), 4),
        "accuracy_by_task": share_by_task(right),
        "same_answer": round(statistics.mean(a.text == b.text for a, b in pairs), 4),
        "prompt_tokens": round(statistics.mean(r.usage.prompt_tokens for r in answers), 1),
        "prefill_rows": round(statistics.mean(r.usage.prompt_tokens - r.usage.reused_tokens for r in answers), 1),
        "prefill_ms": round(statistics.median(r.times.prefill for r in answers), 2),
        "ttft_ms": round(statistics.median(r.times.first_token for r in answers), 2),
        "decode_ms_per_pass": round(statistics.median(_decode_ms(r) for r in answers), 2),
        "ttft_speedup": round(statistics.median(a.times.first_token / b.times.first_token for a, b in pairs), 2),
    }


def _decode_ms(result: Result) -> float:
    """Mean milliseconds of a pass after the prefill."""
    return result.times.decode / max(1, result.forwards - 1)


def _long_figures(times: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(plain, times, strict=True)]
    return {
        "long_ttft_ms": round(statistics.median(times), 2),
        "long_ttft_speedup": round(statistics.median(ratios), 2),
    }
