"""The encode stage: constraints to grammars, media to pixels, and requests to prompts. Needs no language model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from mmserve.config import EngineConfig, MediaConfig
from mmserve.constraint.admission import Admission
from mmserve.constraint.session.session import Session
from mmserve.core.cancellation import Cancellation
from mmserve.core.constraint import CheckedConstraint
from mmserve.core.encoded import Encoded
from mmserve.core.isolation import run_isolated
from mmserve.core.request import MediaPart, Request, RequestId, VideoPart
from mmserve.core.samples import samples
from mmserve.core.tuning import ACCOMPANIED
from mmserve.encode.arriving import Arriving
from mmserve.encode.decoders import Decoders
from mmserve.encode.encoder import Encoder, LoadedPrompt
from mmserve.models.base import EncoderModel
from mmserve.observe import calls
from mmserve.observe.traces import observed, stage_pass
from mmserve.stages.prompt import EncodedPrompt, Prompt, Summaries, plain_prompt
from mmserve.tiers.caches import Caches
from mmserve.transfer.base import Transport

#: Called with the prompt of a request that is prefilled while its clip is read, later with None; and the number of
#: final rows.
Report = Callable[[EncodedPrompt | None, int], None]


class EncodeStage:
    """Encode of one model; its results are sent to prefill by ``to_prefill``.

    Each method belongs to one worker; all may run concurrently, and ``constrain`` several times.
    """

    def __init__(
        self,
        model: EncoderModel,
        engine: EngineConfig,
        media: MediaConfig,
        to_prefill: Transport,
        *,
        max_tokens: int,
        decoders: Decoders,
        cache: Caches | None = None,
    ) -> None:
        self.model, self._to_prefill = model, observed(to_prefill, "prefill")
        self.summaries = Summaries(model, engine)
        self.encoder = Encoder(model, media, max_tokens=max_tokens, cache=cache, decoders=decoders)
        self.admission = Admission(model)
        self._prefill_rows = engine.prefill_tokens
        self._admitted: dict[RequestId, list[Session]] = {}  # for each sample of a waiting request
        self._loaded: dict[RequestId, tuple[LoadedPrompt, Cancellation]] = {}
        self._prompts: dict[RequestId, Encoded] = {}  # prompts encoded elsewhere

    def set_prompt(self, request: RequestId, prompt: Encoded) -> None:
        """Store the prompt of a request that is about to be submitted; encode then ignores its messages."""
        self._prompts[request] = prompt

    def has_prompt(self, request: RequestId) -> bool:
        """Whether the prompt was passed to ``set_prompt``, so that this process must encode the request."""
        return request in self._prompts

    def constrain(self, batch: list[Request]) -> list[BaseException | None]:
        """Compile each request's constraint: None or an error for each, in order."""
        with stage_pass("constraint", batch):
            return run_isolated(self._admit, batch)

    def check_constraint(self, request: Request, answer: str | None) -> CheckedConstraint:
        """Whether the constraint of ``request`` is satisfiable, and whether ``answer`` is valid by its JSON schema.

        Raises the error that the request would fail with; ``InvalidArgument`` for an answer to another kind of
        constraint.
        """
        assert request.constraint is not None, "there is nothing to check"
        most = request.sampling.max_new_tokens
        return self.admission.check(request.constraint, most, request.tenant.cache, answer)

    def load(
        self, batch: list[Request], cancellation: Cancellation, report: Report | None = None
    ) -> list[EncodedPrompt | BaseException | None]:
        """Read the media of each request; ``cancellation`` is checked between frames.

        The prompt of a next-token model with a long clip may be prefilled in the meantime: then ``report`` is called
        first with its outline, and later with the number of its final rows. Such a request is fully encoded at the end,
        and its prompt is returned; otherwise None, even after these calls. Without ``report`` this overlap is
        disabled.
        """

        def load(requests: list[Request]) -> list[EncodedPrompt | None]:
            [request] = requests
            arriving = self._arriving_of(request, report) if report is not None and self._overlaps(request) else None
            loaded = self.encoder.load(request, cancellation.check, arriving)
            if arriving is not None and arriving.encoded is not None:
                with closing(loaded):
                    [encoded] = self.encoder.encode([request], [loaded], cancellation.check)
                    if arriving.complete(encoded):
                        return [self.summaries.of(request, arriving.encoded)]
                loaded = self.encoder.load(request, cancellation.check)
            self._loaded[request.id] = loaded, cancellation
            return [None]

        with stage_pass("load", batch):
            return run_isolated(load, batch)

    def encode(self, batch: list[Request]) -> list[EncodedPrompt | BaseException]:
        """Encode each request, once for all of its samples; returns the engine's summary of its prompt or the error."""
        with stage_pass("encode", batch):
            return self._encoded_and_sent(batch)

    def _encoded_and_sent(self, batch: list[Request]) -> list[EncodedPrompt | BaseException]:
        together = self.model.device.type != "cpu"  # batching saves time only on a GPU
        batches = [batch] if together else [[request] for request in batch]
        outcomes = [outcome for each in batches for outcome in run_isolated(self._encoded, each)]
        for request in batch:
            self._unload(request.id)
        sent: list[EncodedPrompt | BaseException] = []
        for request, outcome in zip(batch, outcomes, strict=True):
            sent += [outcome] if isinstance(outcome, BaseException) else run_isolated(self._sent, [(request, outcome)])
        return sent

    def release(self, request: RequestId) -> None:
        """Forget a request; not while a worker runs it."""
        self._admitted.pop(request, None)
        self._unload(request)
        self._to_prefill.drop(request)

    def warm(self) -> None:
        """Start loading what the first constrained request would otherwise wait for: seconds. Blocks for less than
        that."""
        self.admission.warm()

    def close(self) -> None:
        """Stop the stage's background work and waiting calls; from any thread, may be called repeatedly."""
        self.admission.close()

    @property
    def held(self) -> int:
        """Number of requests with state in this stage."""
        return len(self._admitted) + len(self._loaded) + len(self._prompts)

    def _admit(self, batch: list[Request]) -> list[None]:
        for request in batch:
            calls.working.request = request
            try:
                self._admitted[request.id] = self._sessions(request)
            finally:
                calls.working.request = None
        return [None] * len(batch)

    def _sessions(self, request: Request) -> list[Session]:
        assert request.constraint is not None
        sampling = request.sampling
        return self.admission.admit(
            request.constraint,
            sampling.max_new_tokens,
            sampling.n,
            request.tenant.cache,
            speculates=not sampling.changes_logits,
        )

    def _encoded(self, batch: list[Request]) -> list[Encoded]:
        given = [r for r in batch if r.id in self._prompts]
        others = [r for r in batch if r.id not in self._prompts]
        found = [self._loaded.get(request.id) for request in others]
        loaded = [one[0] for one in found if one is not None]

        def check() -> None:
            for one in found:
                if one is not None:
                    one[1].check()

        check()
        whole = loaded if len(loaded) == len(others) else None
        made = dict(zip((r.id for r in others), self.encoder.encode(others, whole, check), strict=True))
        made |= {r.id: self._prompts[r.id] for r in given}
        return [made[request.id] for request in batch]

    def _unload(self, request: RequestId) -> None:
        self._prompts.pop(request, None)
        found = self._loaded.pop(request, None)
        if found is not None:
            found[0].close()

    def _sent(self, batch: list[tuple[Request, Encoded]]) -> list[EncodedPrompt]:
        return [self._send(request, encoded) for request, encoded in batch]

    def _send(self, request: Request, encoded: Encoded) -> EncodedPrompt:
        """Send a prompt to prefill, once for each sample; once for all if the decoder prunes the prompt first."""
        sessions = self._admitted.pop(request.id, [])
        if encoded.grids:
            self._hand_over(request.id, encoded, sessions)
        else:
            for i, sample in enumerate(samples(request)):  # samples share the prompt, which is read-only
                self._hand_over(sample.id, encoded, sessions[i : i + 1])
        return self.summaries.of(request, encoded)

    def _hand_over(self, request: RequestId, encoded: Encoded, sessions: list[Session]) -> None:
        prompt = Prompt(encoded, sessions)
        self._to_prefill.send(request, prompt if self._to_prefill.in_process else plain_prompt(prompt))

    def _overlaps(self, request: Request) -> bool:
        """Whether the prompt may be prefilled while its clip is read: no part of it depends on later frames."""
        model = self.model
        if not self._to_prefill.in_process or not model.spec.causal or model.deep_layers:
            return False
        media = [p for m in request.messages for p in m.parts if isinstance(p, MediaPart)]
        plain = request.kv_reduction is None and request.image_reuse is None and request.constraint is None
        plain &= (
            not request.encodes_only
            and request.vision.pruner == "none"
            and request.diffusion.commit.name not in ACCOMPANIED
        )
        one = request.sampling.n == 1 and request.id not in self._prompts and self._prefill_rows > 0
        return plain and one and len(media) == 1 and isinstance(media[0], VideoPart) and model.position_axes == 1

    def _arriving_of(self, request: Request, report: Report) -> Arriving:
        def begun(encoded: Encoded) -> None:
            self._to_prefill.send(request.id, Prompt(encoded, arriving=arriving))
            report(self.summaries.begun(request, encoded), int(encoded.image_rows[0]))

        arriving = Arriving(begun, lambda rows: report(None, rows))
        return arriving
