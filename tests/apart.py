"""Processes that each run a stage or two of tiny models, joined by pipes; the models, and requests to them."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import helpers
import torch
from forked import forked
from gemma_checkpoints import gemma, load_gemma
from helpers import ask, dkv, picture, tiny_model
from transformers import PreTrainedTokenizerFast

from mmserve.capabilities import Capabilities
from mmserve.config import EncoderCacheConfig, EngineConfig, MediaConfig, resolve
from mmserve.core.branches import branch_capacity
from mmserve.core.cancellation import Cancellation
from mmserve.core.constraint import (
    CallsOrJson,
    ConstraintMode,
    ConstraintSampling,
    ConstraintSpec,
    Hole,
    JsonSchema,
    Regex,
    Template,
)
from mmserve.core.decisions import CHOICE, INSTRUCTION, YES_NO, Decision
from mmserve.core.request import Amount, Message, Policy, Request, TextPart, Vision
from mmserve.decode.policies import Offered
from mmserve.decoders import decoder_for
from mmserve.encode.decoders import InPlace
from mmserve.kv.pool import PagePool, pages_for
from mmserve.kv.table import PageTable
from mmserve.models.base import Attention, EncoderOnly, LoadedModel, Model
from mmserve.models.decisions import questions_ids
from mmserve.models.decoder import Decoder
from mmserve.observe import traces
from mmserve.stages import Answer, DecodeStage, EncodedPrompt, EncodeStage, PrefillStage
from mmserve.stages.prompt import Summaries
from mmserve.tiers.caches import Caches
from mmserve.transfer.base import Transport
from mmserve.transfer.pipe import PipeTransport

#: Seconds for an answer of a process: far more than any takes, but on a busy machine its first one.
PATIENCE = 240
LAST, BLOCK = Policy(name="last"), Policy(name="block")
ENGINE: dict[str, Any] = {"max_tokens": 160, "torch_threads": 1, "page_size": 8, "max_running": 4}
#: What else the engine of a model has.
ENGINES: dict[str, dict[str, Any]] = {
    "causal": {"prefill_tokens": 16},
    "quest": {"sparse_decode": "quest", "sparse_density": 0.5, "page_size": 16},
    "quantized": {"kv_bits": 8, "kv_kept": 0.25},
}
SCHEMA = JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')


def _like(model: LoadedModel, attention: Attention, **spec: Any) -> LoadedModel:
    changes = {"attention": attention, "logit_shift": int(attention is Attention.CAUSAL), **spec}
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, **changes))


def _causal(seed: int) -> LoadedModel:
    return _like(tiny_model(vision=True, seed=seed), Attention.CAUSAL)


def _guided() -> LoadedModel:
    """A diffusion model beside an unlike next-token model, with five tokens to choose from: they agree now and then."""
    made = tiny_model(vision=True, seed=4)
    banned = tuple(i for i in range(made.decoder.config.vocab_size) if i not in range(70, 75))
    spec = dataclasses.replace(made.spec, end_ids=frozenset({-1}), banned_ids=banned)
    return dataclasses.replace(made, spec=spec, companion=_causal(3))


def load(name: str, folder: str) -> Model:
    """A model by name; ``folder`` holds the checkpoint of the one that is read from disk."""
    made: dict[str, Callable[[], Model]] = {
        "masked": lambda: tiny_model(vision=True),
        "quest": lambda: tiny_model(vision=True),
        "quantized": lambda: tiny_model(vision=True),
        "blocks": lambda: _like(tiny_model(vision=True, seed=5), Attention.BLOCK_CAUSAL),
        "shifted": lambda: _like(
            tiny_model(vision=True, seed=5),
            Attention.BLOCK_CAUSAL,
            logit_shift=1,
            default_block_length=8,
            sub_block=4,
            end_ids=frozenset({-1}),
        ),
        "causal": lambda: _causal(3),
        "guided": _guided,
        "drafted": lambda: dataclasses.replace(_causal(3), companion=_causal(4)),
        "uniform": lambda: load_gemma(Path(folder)),
    }
    return made[name]()


def _with(request: Request, **changes: Any) -> Request:
    streaming = dataclasses.replace(request.streaming, tokens=True, alternatives=3)
    return dataclasses.replace(request, streaming=streaming, **changes)


def _decide(text: str, *questions: Decision, images: tuple[bytes, ...], recompute: Policy | None = None) -> Request:
    """A request with typed questions."""
    request = ask("decide", f"{text}\n{INSTRUCTION}", images=images, recompute=recompute)
    return dataclasses.replace(request, decisions=questions)


def cases() -> dict[str, list[Request]]:
    """Requests to each model: with images, constraints, guidance, companions, reduced K/V and reused images."""
    images = (picture(1), picture(2))
    long = "what is left of the red circle, and what is right of it? "
    spec, two = ConstraintSpec, Vision(pruner="fastv", amount=Amount("keep_ratio", 0.5))
    typed = (Decision(kind=YES_NO, text="a?"), Decision(kind=CHOICE, text="b?", options=("c", "d", "e")))
    template = Template(("a: ", Hole(6, Regex("[0-9]{1,4}")), " b: ", Hole(5, Regex("[xyz]+"))))
    drawn = {"temperature": 0.8, "seed": 7}
    either = CallsOrJson('start: "f(" /[a-z]/ ")"', ("f(",), SCHEMA.text.replace('"a"', '"b"'))
    checked = spec(either, ConstraintMode.VALIDATE)
    said = (Message("user", (TextPart("what is it?"),)), Message("assistant", (TextPart("It is "),)))
    masked = [
        ask("plain", images=images, recompute=dkv(4)),
        ask("drawn", long, images=images[:1], commit=Policy(name="threshold", options={"confidence": 0.3}), **drawn),
        dataclasses.replace(ask("fastv", "what?", images=images), vision=two),
        dataclasses.replace(ask("schema", max_new_tokens=24, block=8), constraint=spec(SCHEMA)),
        dataclasses.replace(ask("either", max_new_tokens=24, block=8), constraint=checked),
        dataclasses.replace(ask("continued"), messages=said, continues=True),
        dataclasses.replace(ask("template", max_new_tokens=30, **drawn), constraint=spec(template)),
        _decide("what?", *typed, images=images),
        ask("early", commit=Policy(name="early_commit")),
        ask("moved", commit=Policy(name="random"), recompute=Policy(name="adaptive"), **drawn),
    ]
    masked[1] = dataclasses.replace(masked[1], diffusion=dataclasses.replace(masked[1].diffusion, cfg_scale=1.0))
    reduced = {name: Policy(name=name, options={"budget": 24}) for name in ("heavy_hitters", "expected_attention")}
    reuse = Policy(name="kv_share", options={"recompute": 0.3})
    awrs = spec(Regex("(red|green|blue){1,4}"), sampling=ConstraintSampling.AWRS)
    causal = [
        ask("plain", long, images=images, recompute=LAST),
        dataclasses.replace(ask("fastv", "what?", images=images, recompute=LAST, **drawn), vision=two),
        *(
            dataclasses.replace(ask(name, long, images=images, recompute=LAST, max_new_tokens=20), kv_reduction=by)
            for name, by in reduced.items()
        ),
        dataclasses.replace(ask("reused", "what?", images=images, recompute=LAST), image_reuse=reuse),
        dataclasses.replace(ask("schema", recompute=LAST, max_new_tokens=24), constraint=spec(SCHEMA)),
        dataclasses.replace(ask("either", recompute=LAST, max_new_tokens=24), constraint=checked),
        dataclasses.replace(ask("continued", recompute=LAST), messages=said, continues=True),
        dataclasses.replace(ask("template", recompute=LAST, max_new_tokens=30), constraint=spec(template)),
        dataclasses.replace(ask("awrs", recompute=LAST, max_new_tokens=24, **drawn), constraint=awrs),
        _decide(long, typed[1], images=images, recompute=LAST),
        ask("ngram", "red red red red", recompute=LAST, commit=Policy(name="ngram"), **drawn),
    ]
    blend = Policy(name="blend", options={"recompute": 0.3})
    found = {
        "masked": [*masked, dataclasses.replace(ask("reused", "what?", images=images), image_reuse=blend)],
        "quest": [ask("plain", long, images=images)],
        "quantized": [ask("plain", long, images=images, recompute=Policy(name="dual"))],
        "blocks": [
            ask("plain", images=images, recompute=BLOCK),
            _decide("what?", typed[0], images=images, recompute=BLOCK),
            dataclasses.replace(ask("schema", recompute=BLOCK, max_new_tokens=24), constraint=spec(SCHEMA)),
        ],
        "shifted": [ask("plain", images=images, recompute=BLOCK, max_new_tokens=20)],
        "causal": causal,
        "guided": [ask("guided", images=images, commit=Policy(name="guided"), **drawn)],
        "drafted": [ask("drafted", images=images, recompute=LAST, commit=Policy(name="draft_model"))],
        "uniform": [
            gemma("plain", "what is it?", images=images[:1], max_new_tokens=20, seed=3),
            dataclasses.replace(gemma("schema", "what?", max_new_tokens=20), constraint=spec(SCHEMA)),
        ],
    }
    return {
        model: [_with(request, id=f"{model}.{request.id}") for request in requests] for model, requests in found.items()
    }


class Home:
    """One model in one process: the stages that ``transports`` name, each decoder with pages of its own."""

    encoding: EncodeStage | None = None

    def __init__(self, name: str, folder: str, transports: dict[str, Transport]) -> None:
        model = load(name, folder)
        engine = resolve(EngineConfig(**{**ENGINE, **ENGINES.get(name, {})}))
        media = MediaConfig()
        offered = Offered.by(model)
        most = Capabilities(model, engine, media, offered).max_tokens
        self.page_size, self.tokenizer = engine.page_size, model.tokenizer
        self.block = model.spec.attention_block
        self.summaries = Summaries(model, engine)
        if "prefill" not in transports and "decode" not in transports:
            only = EncoderOnly.of(model)
            del model, offered
            gc.collect()
            assert name == "uniform" or not any(type(each) is Decoder for each in gc.get_objects())
            to_prefill = transports["encode"]
            self.encoding = EncodeStage(only, engine, media, to_prefill, max_tokens=most, decoders=InPlace(media))
            return
        self.pool = PagePool(engine.pages)
        self.pool.allocate(len(transports))  # page ids differ from process to process
        self.decoder: Any = decoder_for(model, engine, offered, Caches.of(EncoderCacheConfig()).kv)
        if "prefill" in transports:
            joined = transports["prefill"], transports["to_decode"]
            self.prefilling = PrefillStage(model, self.decoder, self.summaries, *joined, max_tokens=most)
        self.decoding = DecodeStage(model, self.decoder, transports["decode"])
        self.pages: dict[str, PageTable] = {}

    def encode(self, request: Request) -> EncodedPrompt:
        """The whole of encode, constraint and media included."""
        stage = self.encoding
        assert stage is not None
        if request.constraint is not None:
            _raised(stage.constrain([request]))
        _raised(stage.load([request], Cancellation()))
        [prompt] = _raised(stage.encode([request]))
        assert stage.held == 0
        return prompt

    def prefill(self, request: Request, prompt: EncodedPrompt) -> EncodedPrompt:
        """The whole of prefill; what is known of the prompt in the end."""
        if prompt.unpruned:
            [prompt] = _raised(self.prefilling.prefill([(request, PageTable())]))
            assert not prompt.unpruned
        self._take(request, prompt)
        while _raised(self.prefilling.prefill([(request, self.pages[request.id])])) != [None]:
            pass
        assert self.prefilling.held == 0
        self._give_back(request)
        return prompt

    def admit(self, request: Request, prompt: EncodedPrompt) -> None:
        """Take over a canvas."""
        self._take(request, prompt)
        self.decoding.admit(request, self.pages[request.id])

    def step(self, request: Request) -> tuple[str, Answer] | None:
        """One step; why the answer ended, and the answer, if it did."""
        [stepped] = _raised(self.decoding.decode([request]))
        if stepped.reason is None:
            return None
        answer = self.decoding.finished(request.id)
        self.decoding.release(request.id)
        self._give_back(request)
        assert self.decoding.held == 0
        return stepped.reason, answer

    def decode(self, request: Request) -> tuple[str, Answer]:
        """All steps."""
        while (ended := self.step(request)) is None:
            pass
        return ended

    def move(self, request: Request, to: Transport) -> None:
        """Send a canvas on."""
        self.decoding.move(request.id, to)
        self._give_back(request)

    def close(self) -> None:
        """End what runs beside the stages."""
        if self.encoding is not None:
            self.encoding.close()

    def _take(self, request: Request, prompt: EncodedPrompt) -> None:
        new = request.sampling.max_new_tokens
        if request.decisions:
            lengths = questions_ids(self.tokenizer, request.decisions).lengths
            new = branch_capacity(lengths, self.page_size, self.block)
        positions = prompt.usage.prompt_tokens + new
        count = request.sequences * pages_for(positions, self.page_size)
        self.pages[request.id] = PageTable.take(self.pool, count, ())

    def _give_back(self, request: Request) -> None:
        self.pool.release(self.pages.pop(request.id).ids)
        for stored in getattr(getattr(getattr(self.decoder, "parts", None), "store", None), "keys", ()):
            stored.fill_(torch.nan)  # whoever still reads these pages shall not find what it looks for


def _raised(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def serve(control: Connection, folder: str, ends: dict[str, Connection], environment: dict[str, str]) -> None:
    """The main function of a process: runs what comes by ``control`` until there is nothing more."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    end_traces = traces.configure()
    trained = PreTrainedTokenizerFast.from_pretrained(folder)
    helpers.tokenizer = lambda: trained  # to train it takes seconds
    transports: dict[str, Transport] = {name: PipeTransport(end, receives=end.readable) for name, end in ends.items()}
    homes: dict[str, Home] = {}
    while (command := control.recv()) is not None:
        what, name, *given = command
        try:
            if what == "move":
                given[1] = transports[given[1]]
            if name not in homes:
                homes[name] = Home(name, folder, transports)
            control.send(getattr(homes[name], what)(*given))
        except BaseException as error:  # noqa: BLE001 - told to the test
            control.send(error)
    for home in homes.values():
        home.close()
    end_traces()


def serve_each(given: list[tuple[Connection, dict[str, Connection]]], folder: str, environment: dict[str, str]) -> None:
    """The main function of a process that forks itself into one for each of ``given``, and waits for their ends.

    So that this module, and what it imports, is imported once.
    """
    forks: list[int] = []
    for control, ends in given:
        if not (fork := os.fork()):
            for other in {end for each in given for end in (each[0], *each[1].values())} - {control, *ends.values()}:
                other.close()
            serve(control, folder, ends, environment)
            return
        forks.append(fork)
    for control, ends in given:
        for end in (control, *ends.values()):
            end.close()
    statuses = [os.waitpid(fork, 0)[1] for fork in forks]
    sys.exit(any(statuses))


class Apart:
    """Three processes: encode, prefill and decode; the last two also take each other's canvases."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        context = forked()
        prompts, first, back = (context.Pipe(duplex=False) for _ in range(3))
        ends = {
            "encode": {"encode": prompts[1]},
            "prefill": {"prefill": prompts[0], "to_decode": first[1], "decode": back[0]},
            "decode": {"decode": first[0], "back": back[1]},
        }
        self._controls: dict[str, Connection] = {}
        given = []
        for role, own in ends.items():
            self._controls[role], theirs = context.Pipe()
            given.append((theirs, own))
        self._process = context.Process(target=serve_each, args=(given, str(folder), environment), daemon=True)
        self._process.start()
        for end in (*prompts, *first, *back, *(theirs for theirs, _ in given)):
            end.close()

    def ask(self, role: str, what: str, *given: Any) -> Any:
        """What the process of ``role`` answers; what it raises is raised here."""
        self._controls[role].send((what, *given))
        assert self._controls[role].poll(PATIENCE), f"{role} says nothing"
        answer = self._controls[role].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def answered(self, name: str, request: Request) -> tuple[EncodedPrompt, str, Answer]:
        """One request through all three."""
        prompt = self.ask("prefill", "prefill", name, request, self.ask("encode", "encode", name, request))
        self.ask("decode", "admit", name, request, prompt)
        return prompt, *self.ask("decode", "decode", name, request)

    def wandered(self, name: str, request: Request) -> tuple[str, Answer, int]:
        """One request whose canvas goes from one process to the other after every step, and how often it did."""
        prompt = self.ask("prefill", "prefill", name, request, self.ask("encode", "encode", name, request))
        here, there, moves = ("decode", "back"), ("prefill", "to_decode"), 0
        self.ask(here[0], "admit", name, request, prompt)
        while (ended := self.ask(here[0], "step", name, request)) is None:
            self.ask(here[0], "move", name, request, here[1])
            here, there, moves = there, here, moves + 1
            self.ask(here[0], "admit", name, request, prompt)
        return *ended, moves

    def close(self) -> None:
        for control in self._controls.values():
            control.send(None)
        self._process.join(PATIENCE)
        assert self._process.exitcode == 0
