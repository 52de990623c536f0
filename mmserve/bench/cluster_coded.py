"""K/V quantized to few bits for the transfer to decode: changes of answers, and savings of bytes and time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean

from mmserve.assembly import build_engines
from mmserve.bench.cluster_fleets import config, started
from mmserve.bench.in_process import Answer
from mmserve.bench.measures import Figures, at_least, figure, stated
from mmserve.core.events import Event, Finished
from mmserve.core.handover import Ahead, HandedOver, Handover, Saved
from mmserve.core.payloads import PrefilledPayload
from mmserve.core.progress import Progress
from mmserve.core.request import Diffusion, ImagePart, Message, Policy, Request, Sampling, Stage, Streaming, TextPart
from mmserve.engine.engine import Engine
from mmserve.reference.evaluate import canvas, item, media_files
from mmserve.reference.tasks import TASKS, correct
from mmserve.transfer.kv_coding import coded, decoded
from mmserve.transfer.payloads import PAYLOADS

#: Models with the recompute policy used to decode with them.
_MODELS = {"bundled": "none", "bundled-causal": "last"}
#: Bits of a value; 0 = not quantized.
_BITS = (0, 8, 6, 5, 4)
#: Questions of each kind of subject in a turn; clips are left out, as generating their files takes too long.
_QUESTIONS = 10
_GBITS = (0.1, 1.0, 10.0, 100.0)
#: Timeout of a request in seconds.
_PATIENCE = 600.0


@dataclass
class _Of:
    """Results of all questions at one number of bits."""

    right: int = 0
    changed: int = 0
    drift: list[float] = field(default_factory=list)  # of log-probabilities, until tokens differ
    bytes: int = 0
    seconds: float = 0.0  # CPU time of quantizing and dequantizing


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Figures:
    """Prefill each question once, and decode it in another engine from its K/V at each number of bits.

    Questions of a kind are prefilled together, and a question's copies decoded together: the results are independent of
    batching.
    """
    rows, measures = [], []
    kinds = [task for task, kind in TASKS.items() if kind != "video"]
    for path, recompute in _MODELS.items():
        first, other = (next(iter(build_engines(config(path)).values())) for _ in range(2))
        found = {bits: _Of() for bits in _BITS}
        asked = 0
        with started(first, ["encode", "prefill"]), started(other, ["decode"]):
            for task in kinds:
                questions = [item(task, index, 7) for index in range(_QUESTIONS * arguments.repeats)]
                calls = []
                for index, (thing, question) in enumerate(questions):
                    images = tuple(ImagePart(data) for data in media_files(task, thing)["images"])
                    parts: tuple[ImagePart | TextPart, ...] = (*images, TextPart(question.text))
                    calls.append(_prefill(first, _request(f"{task}.{index}", parts, task, recompute)))
                for (_thing, question), call in zip(questions, calls, strict=True):
                    left = call.handed_on()
                    again = _decode(other, left, 0, _Of(), "again")
                    answers = {bits: _decode(other, left, bits, found[bits], f"{bits}") for bits in _BITS}
                    exact = again.answered()
                    for bits, answer in answers.items():
                        found[bits].right += correct(question, answer.answered().text)
                        _compare(exact, answer.answered(), found[bits])
                    asked += 1
                progress(f"{path}, {task}: {asked} questions in all")
        for bits, of in found.items():
            rows.append({"model": path, "bits": bits, "questions": asked, "bytes": of.bytes, "seconds": of.seconds})
            measures += _measures(path, bits, of, found[0], asked)
    return {
        "rows": rows,
        "measures": measures,
        "settings": {"questions": _QUESTIONS * arguments.repeats, "bits": _BITS},
    }


def _measures(path: str, bits: int, of: _Of, exact: _Of, asked: int) -> list[Figures]:
    name = f"{path}, {bits} bits" if bits else f"{path}, as they are"
    made = [stated(f"{name}, right", of.right / asked, "share")]
    if not bits:
        return [*made, at_least(f"{name}, same answers twice", 1 - of.changed / asked, "share", 1.0)]
    made += [
        stated(f"{name}, answers with another token", of.changed / asked, "share"),
        stated(f"{name}, log-probability until then, mean change", figure(of.drift, mean), "nats"),
        stated(f"{name}, fewer bytes", exact.bytes / of.bytes, "x"),
        stated(f"{name}, coded and decoded, processor time a MB", 1e9 * of.seconds / exact.bytes, "ms"),
    ]
    for rate in _GBITS:
        whole, less = (8 * each.bytes / (rate * 1e9) for each in (exact, of))
        made.append(stated(f"{name}, sooner over {rate:g} Gbit/s", whole / (less + of.seconds), "x"))
    return made


def _request(name: str, parts: tuple[ImagePart | TextPart, ...], task: str, recompute: str) -> Request:
    return Request(
        id=name,
        model="",
        messages=(Message("user", parts),),
        sampling=Sampling(max_new_tokens=canvas(task), temperature=0.0),
        diffusion=Diffusion(recompute=Policy(name=recompute)),
        streaming=Streaming(tokens=True),
    )


class _Handed(Answer):
    """An answer, or the handover of the request after prefill."""

    left: Handover | None = None

    def take(self, event: Event | Progress | HandedOver | Saved | Ahead) -> None:
        """Record an event."""
        if isinstance(event, HandedOver):
            self.left = event.handover
            self.over.set()
        elif not isinstance(event, Saved | Ahead):
            self.sink(event)

    def handed_on(self) -> Handover:
        """The handover, once it has happened; raises the error of the request."""
        self.over.wait(_PATIENCE)
        if self.left is None:
            raise RuntimeError(f"a request did not leave after its prefill: {self.whole()}")
        return self.left

    def answered(self) -> Finished:
        """The answer, once it is complete; raises the error of the request."""
        self.over.wait(_PATIENCE)
        return self.whole()


def _prefill(engine: Engine, request: Request) -> _Handed:
    answer = _Handed()
    engine.adopt(Handover(request, Stage.QUEUED, None), answer.take)
    return answer


def _decode(engine: Engine, left: Handover, bits: int, of: _Of, name: str) -> _Handed:
    payload = left.payload
    assert isinstance(payload, PrefilledPayload)
    begun = time.thread_time()
    sent = coded(payload, bits, engine.stages.store.num_layers) if bits else payload
    of.seconds += time.thread_time() - begun
    data = PAYLOADS.encode(sent)
    of.bytes += len(data)
    came = PAYLOADS.decode(data)
    begun = time.thread_time()
    came = decoded(came)
    of.seconds += time.thread_time() - begun
    answer = _Handed()
    request = replace(left.request, id=f"{left.request.id}.{name}")
    engine.adopt(replace(left, request=request, payload=came), answer.take)
    return answer


def _compare(exact: Finished, answer: Finished, of: _Of) -> None:
    for one, other in zip(exact.tokens, answer.tokens, strict=False):
        if one.id != other.id:
            break
        of.drift.append(abs(one.log_probability - other.log_probability))
    of.changed += [token.id for token in exact.tokens] != [token.id for token in answer.tokens]
