"""Accuracy about streams, of the model alone: ``python -m mmserve.reference.stream_accuracy --model FOLDER``.

Two measurements. ``window_accuracy`` runs whole windows at once, for either kind of model. ``stream_accuracy`` runs
streams frame by frame through a K/V cache of its own, with eviction in chunks that know nothing of the clips, and asks
at moments far into the stream; questions are run on a branch, so that the cache never holds any.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from mmserve_kernels.rope_scatter import rotate
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmserve.models.chat import VIDEO, prompt_ids
from mmserve.models.decoder import Decoder
from mmserve.models.lora_files import WEIGHTS
from mmserve.reference.clips import VIDEO as CLIP_TASKS
from mmserve.reference.clips import Clip, draw_clip
from mmserve.reference.data import Sample, collate
from mmserve.reference.evaluate import Row, row
from mmserve.reference.exported import read_exported
from mmserve.reference.heldout import answer_errors
from mmserve.reference.items import TEST_SEEDS, Question
from mmserve.reference.low_rank import merge_adapter
from mmserve.reference.model import FRAME_TIME, ReferenceModel
from mmserve.reference.stream_frames import SeenFrames
from mmserve.reference.streams import LABEL_CYCLE, Window, ask, draw_window
from mmserve.reference.tokenizer import EOT, token_id, train_tokenizer

#: Frames that a stream drops at once; carriers are made of them then.
CHUNK = 8
#: Windows (whole frames, carriers) that are measured one by one.
LAYOUTS = ((8, 0), (16, 0), (20, 0), (40, 0), (8, 64))
#: What streams keep (whole frames at most, carriers at most) and when they are asked (frames).
KEPT, MOMENTS = ((20, 0), (8, 64)), (600, 603, 606)
#: Rows of the video tasks about the newest clip, where it is whole in the window and where it is not.
NEWEST, WHOLE_CLIP, PART_OF_CLIP = "newest clip", "whole clip", "part of a clip"
#: Test clips, and questions that one pass answers.
TEST_CLIPS, ASKED_AT_ONCE = 400, 64


@dataclass(frozen=True)
class StreamRow:
    """Accuracy of one task in one layout: at most ``whole`` whole frames and ``carriers``, after ``frames`` frames."""

    whole: int
    carriers: int
    frames: int
    result: Row


def held_out_clips(count: int = TEST_CLIPS) -> list[Clip]:
    """Clips that training never saw."""
    return [draw_clip(random.Random(TEST_SEEDS[-1] - number)) for number in range(count)]


@dataclass(frozen=True)
class Outcome:
    """One question's task, whether it was answered right, and the moment it was asked at.

    ``label`` is that of the newest frame; ``over``: the newest clip is whole in the window and has ended.
    """

    task: str
    right: bool
    label: int
    over: bool

    @classmethod
    def of(cls, window: Window, question: Question, *, right: bool) -> Outcome:
        """The outcome of ``question`` about ``window``."""
        newest = len(window.clips) - 1
        whole = len(window.indices_of(newest)) == window.clips[newest].seconds
        return cls(question.task, right, window.label(len(window.whole) - 1), whole)

    @property
    def groups(self) -> tuple[str, ...]:
        """The rows that it counts in."""
        if self.task not in CLIP_TASKS.tasks:
            return self.task, "all"
        part = WHOLE_CLIP if self.over else PART_OF_CLIP
        return self.task, "all", NEWEST, part, f"label {self.label}"


def rows_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """A row for each task and for all, and for the video tasks about the newest clip together: all of them, those about
    a whole clip and about a part of one, and by the label of the newest frame."""
    right, asked = Counter[str](), Counter[str]()
    for outcome in outcomes:
        asked.update(outcome.groups)
        right.update(outcome.groups if outcome.right else ())
    return [row(name, right[name], asked[name]) for name in sorted(asked)]


@torch.no_grad()
def window_accuracy(
    model: ReferenceModel,
    tokenizer: PreTrainedTokenizerFast,
    seen: SeenFrames,
    *,
    whole: int,
    carriers: int,
    windows: int,
    seed: int = 0,
) -> list[Row]:
    """Share of right answers about ``windows`` random windows of one layout, each run at once, by task."""
    rng = random.Random(f"{seed} {whole} {carriers}")
    outcomes: list[Outcome] = []
    for _ in range(windows // 8):
        samples: list[Sample] = []
        while len(samples) < 8:
            window = draw_window(rng, whole, carriers, seen.clips)
            questions = [q for q in ask(window, rng) if q.task != "narration"][:6]
            samples += [(window, [q]) for q in questions[:1]] if not model.causal else []
            samples += [(window, questions)] if model.causal and questions else []
        batch = collate("stream", samples, 0 if model.causal else 16, tokenizer)
        visual = seen.of([window for window, _questions in samples])
        wrong = answer_errors(model, tokenizer, visual, batch)
        for index, (window, questions) in enumerate(samples):
            for number, question in enumerate(questions, start=1):
                of_it = batch.question[index] == number
                outcomes.append(Outcome.of(window, question, right=not (wrong[index] & of_it).any()))
    return rows_of(outcomes)


class Cache:
    """K/V of B streams of one shape: keys before rotation ``[B, T, H, K]`` a layer, so that positions are 0 to T - 1
    again whenever some are dropped."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __len__(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0

    def run(self, x: Tensor, *, append: bool, rows: Tensor | None = None) -> Tensor:
        """Hidden states ``[B, n, D]`` of embeddings ``x`` after all that is kept of their streams; ``append`` keeps
        them too. ``rows`` are the streams that x belongs to, by default each in turn."""
        past, new = len(self), x.shape[1]
        sees = torch.ones(new, past + new, dtype=torch.bool).tril(past)
        tables = self.decoder.rotary(torch.arange(past + new))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            if past:
                old_k, old_v = self.keys[layer], self.values[layer]
                if rows is not None:
                    old_k, old_v = old_k[rows], old_v[rows]
                k, v = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
            if append:
                self.keys[layer : layer + 1], self.values[layer : layer + 1] = [k], [v]
            q, k, v = (y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, *tables), v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2)

        hidden: Tensor = self.decoder(x, torch.arange(past, past + new), attend)
        return hidden

    def keep(self, positions: Sequence[int]) -> Cache:
        """A cache of only these positions."""
        kept = Cache(self.decoder)
        kept.keys = [keys[:, list(positions)] for keys in self.keys]
        kept.values = [values[:, list(positions)] for values in self.values]
        return kept

    def join(self, other: Cache) -> None:
        """Append what ``other`` holds."""
        self.keys = [torch.cat(pair, 1) for pair in zip(self.keys, other.keys, strict=True)]
        self.values = [torch.cat(pair, 1) for pair in zip(self.values, other.values, strict=True)]


class Streams:
    """B streams of random clips, shown to the model frame by frame, old frames dropped or made carriers."""

    def __init__(
        self,
        model: ReferenceModel,
        tokenizer: PreTrainedTokenizerFast,
        seen: SeenFrames,
        *,
        count: int,
        whole: int,
        carriers: int,
        seed: int,
    ) -> None:
        self.decoder, self.tokenizer, self.seen = model.decoder, tokenizer, seen
        self.most_whole, self.most_carriers = whole, carriers
        self.rngs = [random.Random(f"stream {seed} {index}") for index in range(count)]
        self.clips: list[list[Clip]] = [[] for _ in range(count)]
        self.frames: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # (clip, frame) of every frame so far
        header = _around(tokenizer, "")[0]
        self.sinks = len(header)
        self.cache = Cache(self.decoder)
        self.cache.run(self.decoder.embed(torch.tensor(header)).expand(count, -1, -1), append=True)
        self.whole = self.carriers = 0
        self.pooled: list[Tensor] = []  # one row [B, D] of each whole frame

    @property
    def second(self) -> int:
        """The second of the newest frame."""
        return len(self.frames[0]) - 1

    def advance(self) -> None:
        """Show one more frame of every stream."""
        if self.whole == self.most_whole:
            self._evict(min(CHUNK, self.whole))
        newest = []
        for rng, clips, frames in zip(self.rngs, self.clips, self.frames, strict=True):
            if not frames or frames[-1][1] + 1 == clips[frames[-1][0]].seconds:
                clips.append(rng.choice(self.seen.clips))
                frames.append((len(clips) - 1, 0))
            else:
                frames.append((frames[-1][0], frames[-1][1] + 1))
            newest.append(self.seen.frame(clips[-1], frames[-1][1]))
        tokens = torch.stack(newest).float()
        label = FRAME_TIME.format(seconds=self.second % LABEL_CYCLE)
        words = self.decoder.embed(torch.tensor(self.tokenizer.encode(label, add_special_tokens=False)))
        self.cache.run(torch.cat([words.expand(len(tokens), -1, -1), tokens], 1), append=True)
        self.pooled.append(tokens.mean(1))
        self.whole += 1

    def _evict(self, count: int) -> None:
        """Drop the ``count`` oldest whole frames, or make them carriers, of which the oldest are dropped."""
        per_frame = (len(self.cache) - self.sinks - self.carriers) // self.whole
        front = self.sinks + self.carriers
        recent = self.cache.keep(range(front + count * per_frame, len(self.cache)))
        self.cache = self.cache.keep(range(front))
        if self.most_carriers:
            self.cache.run(torch.stack(self.pooled[:count], 1), append=True)
            self.carriers += count
            over = max(0, self.carriers - self.most_carriers)
            self.cache = self.cache.keep([*range(self.sinks), *range(self.sinks + over, len(self.cache))])
            self.carriers -= over
        self.cache.join(recent)
        self.pooled = self.pooled[count:]
        self.whole -= count

    def windows(self) -> Iterator[Window]:
        """What is kept of each stream now."""
        for clips, frames in zip(self.clips, self.frames, strict=True):
            kept = frames[len(frames) - self.whole - self.carriers :]
            oldest = kept[0][0]
            yield Window(
                tuple(clips[oldest:]), tuple((clip - oldest, frame) for clip, frame in kept), self.carriers, self.second
            )

    def right(self, asked: Sequence[tuple[int, Question]]) -> list[bool]:
        """Whether greedy decoding would answer each (stream, question) right; nothing of it is kept."""
        end = self.tokenizer.eos_token_id
        tails = [_around(self.tokenizer, question.text)[1] for _stream, question in asked]
        answers = [_answer(self.tokenizer, question.answer) for _stream, question in asked]
        longest = max(len(t) + len(a) for t, a in zip(tails, answers, strict=True))
        ids = torch.tensor([t + a + [end] * (longest - len(t) - len(a)) for t, a in zip(tails, answers, strict=True)])
        rows = torch.tensor([stream for stream, _question in asked])
        hidden = self.cache.run(self.decoder.embed(ids), append=False, rows=rows)
        best = self.decoder.logits(hidden).argmax(-1)
        return [
            best[index, len(tail) - 1 : len(tail) + len(answer) - 1].tolist() == answer
            for index, (tail, answer) in enumerate(zip(tails, answers, strict=True))
        ]


@torch.no_grad()
def stream_accuracy(
    model: ReferenceModel,
    tokenizer: PreTrainedTokenizerFast,
    seen: SeenFrames,
    *,
    whole: int,
    carriers: int,
    moments: Sequence[int] = MOMENTS,
    streams: int = 32,
    seed: int = 0,
) -> list[Row]:
    """Share of right answers at ``moments`` (frames seen, ascending) of ``streams`` streams, by task."""
    running = Streams(model, tokenizer, seen, count=streams, whole=whole, carriers=carriers, seed=seed)
    rng = random.Random(f"questions {seed}")
    outcomes: list[Outcome] = []
    for moment in moments:
        while running.second + 1 < moment:
            running.advance()
        windows = list(running.windows())
        questions = [(i, q) for i, w in enumerate(windows) for q in ask(w, rng) if q.task != "narration"]
        for start in range(0, len(questions), ASKED_AT_ONCE):
            some = questions[start : start + ASKED_AT_ONCE]
            results = zip(some, running.right(some), strict=True)
            outcomes += [Outcome.of(windows[stream], question, right=right) for (stream, question), right in results]
    return rows_of(outcomes)


def _around(tokenizer: PreTrainedTokenizerFast, question: str) -> tuple[list[int], list[int]]:
    """Ids of the chat template before and after a video's positions."""
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
    ids = prompt_ids(tokenizer, chat)
    at = ids.index(token_id(tokenizer, VIDEO))
    return ids[:at], ids[at + 1 :]


def _answer(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), token_id(tokenizer, EOT)]


def measure(folder: Path, *, windows: int, streams: int, seed: int = 0, adapter: Path | None = None) -> list[StreamRow]:
    """All of both measurements for the exported model in ``folder``, with ``adapter`` where there is one; a diffusion
    model has no ``stream_accuracy``."""
    tokenizer = train_tokenizer()
    causal = json.loads((folder / "config.json").read_text())["model_type"] == "llava_llama"
    model = ReferenceModel(json.loads((folder / "config.json").read_text())["vocab_size"], causal=causal).eval()
    read_exported(folder, model)
    if adapter is not None:
        merge_adapter(model, load_file(adapter / WEIGHTS))
    seen = SeenFrames.compute(model, held_out_clips())
    found = []
    for whole, carriers in LAYOUTS if causal else [layout for layout in LAYOUTS if not layout[1]]:
        rows = window_accuracy(model, tokenizer, seen, whole=whole, carriers=carriers, windows=windows, seed=seed)
        found += [StreamRow(whole, carriers, whole + carriers, result) for result in rows]
    for whole, carriers in KEPT if causal else ():
        rows = stream_accuracy(model, tokenizer, seen, whole=whole, carriers=carriers, streams=streams, seed=seed)
        found += [StreamRow(whole, carriers, MOMENTS[0], result) for result in rows]
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("mmserve/assets/bundled-causal"), help="an exported model")
    parser.add_argument("--adapter", type=Path, help="an exported adapter of it")
    parser.add_argument("--windows", type=int, default=160, help="windows of each layout")
    parser.add_argument("--streams", type=int, default=48, help="streams of each layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(
        arguments.model,
        windows=arguments.windows,
        streams=arguments.streams,
        seed=arguments.seed,
        adapter=arguments.adapter,
    )
    if arguments.json:
        print(json.dumps([asdict(r) for r in rows]))
        return
    for r in rows:
        where = f"{r.whole} whole, {r.carriers} carriers, after {r.frames} frames"
        print(f"{where:45} {r.result.task:12} {r.result.accuracy:6.1%} of {r.result.n}")


if __name__ == "__main__":
    main()
