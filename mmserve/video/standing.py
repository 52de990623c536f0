"""Standing questions: typed answers to many questions about one frame, with their probabilities, in one forward pass.

A frame is judged as a separate image, not on the K/V of its stream: with the bundled causal model 99% of yes/no answers
are then right, and 63 to 78% on a stream's K/V. Causal models run the frame once, with all questions after it in the
same pass. Each question attends only to the frame and itself, and common prefixes of questions are run once. Shapes in
names: R rows of the frame, T rows of a pass, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmserve.decode.forward import row_floor
from mmserve.decode.logits import padded_rows
from mmserve.errors import InvalidArgument, Unimplemented
from mmserve.models.alone import hidden_alone
from mmserve.models.base import Attention, LoadedModel, Model
from mmserve.models.chat import prompt_ids
from mmserve.models.decoder import dense_attention
from mmserve.models.decoder_config import UNEVEN
from mmserve.video.base import EncodedFrame
from mmserve.video.choices import Choices, Tokens
from mmserve.video.forest import Forest

#: Limits: questions of one call of ``judge``, choices of a question, and tokens of a question including its choices.
MAX_QUESTIONS, MAX_CHOICES, MAX_TOKENS = 32, 16, 128
#: Cache sizes: prepared sets of questions, with masks of up to 10 MB each (usually 0.1 MB), and single questions.
_READY_SETS, _READY_QUESTIONS = 32, 1024
#: Masked positions after a question in a masked diffusion model: the bundled model's shortest canvas.
_CANVAS = 16
#: Maximum rows in one pass of a model without causal attention.
_TOGETHER = 8


@dataclass(frozen=True)
class StandingQuestion:
    """A question asked about every frame, and its allowed answers in the model's words."""

    text: str
    choices: tuple[str, ...] = ("yes", "no")


@dataclass(frozen=True)
class TypedAnswer:
    """A typed answer. ``probabilities``: of each choice, summing to 1; ``mass``: total probability of the choices in
    the model's distribution.

    If ``mass`` is small, the model would prefer another answer, and the probabilities are unreliable.
    """

    choices: tuple[str, ...]
    probabilities: tuple[float, ...]
    mass: float

    @property
    def answer(self) -> str:
        """The most probable choice; the first one of ties."""
        return self.choices[max(range(len(self.choices)), key=self.probabilities.__getitem__)]

    def probability(self, choice: str) -> float:
        """The probability of one of ``choices``."""
        return self.probabilities[self.choices.index(choice)]


@dataclass(frozen=True)
class _Prompt:
    """A tokenised question: the chat before the frame, that after it up to the answer, and the choices."""

    before: Tokens
    after: Tokens
    choices: Choices


@dataclass(frozen=True)
class _Pack:
    """The rows of several questions after one frame, for a causal model."""

    before: Tokens
    ids: Tensor  # int64 [nodes]
    depths: Tensor  # int64 [nodes]: positions after the frame
    mask: Tensor  # bool [nodes, nodes]: attention mask
    wanted: Tensor  # int64: nodes whose logits are needed, without duplicates
    places: tuple[tuple[int, ...], ...]  # for each question and each of its ``begun``: index in ``wanted``


class Standing:
    """Answers standing questions about frames with one model; keeps no state of any frame.

    Thread-safe: calls share only bounded caches of tokenised questions, and weights. A call runs on its caller's
    thread. Raises ``Unimplemented`` for models without images, with several position axes, or with visual features in
    several layers.
    """

    def __init__(self, model: Model) -> None:
        if not isinstance(model, LoadedModel):
            raise Unimplemented(f"{model.spec.name} denoises random tokens: it has no probabilities of an answer")
        if model.vision is None or model.spec.image_id is None:
            raise Unimplemented(f"{model.spec.name} takes no images, so it cannot answer standing questions")
        if model.position_axes > 1 or model.decoder.config.deep_layers:
            raise Unimplemented(f"standing questions are not implemented for the image positions of {model.spec.name}")
        if not model.decoder.config.plain_attention:
            raise Unimplemented(f"standing questions are not implemented for {model.spec.name}: {UNEVEN}")
        self._model = model
        self._floor = row_floor(model)
        self._prompt = lru_cache(_READY_QUESTIONS)(self._tokenised)
        self._pack = lru_cache(_READY_SETS)(self._packed)

    def check(self, question: StandingQuestion, path: str = "question") -> None:
        """Raises ``InvalidArgument`` for a question that cannot be judged; ``path`` names it in the request."""
        if not question.text.strip():
            raise InvalidArgument.of(f"{path}.text", "must not be empty")
        if not 2 <= len(question.choices) <= MAX_CHOICES:
            raise InvalidArgument.of(f"{path}.choices", f"must be 2 to {MAX_CHOICES}, not {len(question.choices)}")
        longest = max(map(len, (question.text, *question.choices)))
        if longest > 32 * MAX_TOKENS:  # checked before tokenising
            raise InvalidArgument.of(path, f"a text of {longest} characters is too long")
        prompt = self._prompt(question)
        sequences = prompt.choices.sequences
        if not all(sequences) or len(set(sequences)) < len(sequences):
            raise InvalidArgument.of(f"{path}.choices", "must be different, and none empty")
        tokens = len(prompt.after) + sum(map(len, sequences))
        if tokens > MAX_TOKENS:
            raise InvalidArgument.of(path, f"has {tokens} tokens with its choices; at most {MAX_TOKENS} are allowed")

    def judge(self, frame: EncodedFrame, questions: Sequence[StandingQuestion]) -> list[TypedAnswer]:
        """The answers to ``questions`` (see ``check``) about ``frame``, in order; at most ``MAX_QUESTIONS``.

        For causal models this is one forward pass of the frame's rows and some 8 to 13 rows for each question. For
        others, in which a frame's rows depend on the question, it is one pass of the whole prompt for each question and
        for each further token of its longer choices: some 20 ms for each question with the bundled diffusion model on
        one thread. Within 1e-5, the answers do not depend on other questions.
        """
        if len(questions) > MAX_QUESTIONS:
            raise InvalidArgument.of("questions", f"at most {MAX_QUESTIONS} at once, not {len(questions)}")
        if not questions:
            return []
        run = self._causal if self._model.spec.causal else self._masked
        return run(frame.whole_RD, tuple(questions))

    @torch.inference_mode()
    def _causal(self, frame_RD: Tensor, questions: tuple[StandingQuestion, ...]) -> list[TypedAnswer]:
        decoder, device = self._model.decoder, self._model.device
        pack = self._pack(questions)
        before = decoder.embed(torch.tensor(pack.before, dtype=torch.int64, device=device))
        x_TD = torch.cat([before, frame_RD.to(before), decoder.embed(pack.ids)])
        start, rows = len(before) + len(frame_RD), len(x_TD)
        total = padded_rows(rows, self._floor)
        mask = torch.eye(total, dtype=torch.bool, device=device)  # padding attends to itself
        mask[:start, :start] = torch.ones(start, start, dtype=torch.bool, device=device).tril()
        mask[start:rows, :start] = True
        mask[start:rows, start:rows] = pack.mask
        positions = F.pad(torch.cat([torch.arange(start, device=device), start + pack.depths]), (0, total - rows))
        wanted = F.pad(start + pack.wanted, (0, padded_rows(len(pack.wanted), self._floor) - len(pack.wanted)))
        hidden = hidden_alone(decoder, F.pad(x_TD, (0, 0, 0, total - rows)), positions, mask, wanted)
        log_p = self._log_probabilities(hidden)
        return [
            self._judged(question, [log_p[place] for place in places])
            for question, places in zip(questions, pack.places, strict=True)
        ]

    @torch.inference_mode()
    def _masked(self, frame_RD: Tensor, questions: tuple[StandingQuestion, ...]) -> list[TypedAnswer]:
        """Each prefix of an answer is a row of a batch with rows of the same length: there is no padding."""
        prompts = [self._prompt(question) for question in questions]
        asked = [(p.before, (*p.after, *b), max(1, _CANVAS - len(b))) for p in prompts for b in p.choices.begun]
        order = sorted(range(len(asked)), key=lambda i: tuple(map(len, asked[i][:2])) + asked[i][2:])
        found: dict[int, Tensor] = {}
        for _lengths, group in groupby(order, key=lambda i: tuple(map(len, asked[i][:2])) + asked[i][2:]):
            same = list(group)
            for some in (same[i : i + _TOGETHER] for i in range(0, len(same), _TOGETHER)):
                found.update(zip(some, self._whole(frame_RD, [asked[i] for i in some]), strict=True))
        rows = iter(range(len(asked)))
        return [
            self._judged(question, [found[next(rows)] for _ in prompt.choices.begun])
            for question, prompt in zip(questions, prompts, strict=True)
        ]

    def _whole(self, frame_RD: Tensor, asked: Sequence[tuple[Tokens, Tokens, int]]) -> Tensor:
        """Log-probabilities ``[B, V]`` at the first masked position of prompts of the same length."""
        model, spec = self._model, self._model.spec
        ids = [[*before, *after, *[spec.mask_id] * masks] for before, after, masks in asked]
        head, masks = len(asked[0][0]), asked[0][2]
        x_BTD = model.decoder.embed(torch.tensor(ids, device=model.device))
        frame = frame_RD.to(x_BTD).expand(len(x_BTD), -1, -1)
        x_BTD = torch.cat([x_BTD[:, :head], frame, x_BTD[:, head:]], 1)
        total = x_BTD.shape[1]
        answer = total - masks
        positions = torch.arange(total, device=model.device)
        attend = dense_attention(self._attention_mask(positions, answer))
        hidden = model.decoder(x_BTD, positions, attend)[:, answer - spec.logit_shift]
        padding = padded_rows(len(hidden), self._floor) - len(hidden)
        return self._log_probabilities(F.pad(hidden, (0, 0, 0, padding)))[: len(asked)]

    def _attention_mask(self, positions: Tensor, answer: int) -> Tensor | None:
        """The attention mask of a prompt and canvas, bool ``[1, T, T]``; ``answer``: position of the answer."""
        spec, total = self._model.spec, len(positions)
        if spec.attention is Attention.FULL:
            return None
        if spec.attention is Attention.PREFIX:
            limit = torch.where(positions < answer, answer, total)
        else:
            block = spec.attention_block or 1
            limit = (positions // block + 1) * block
        return (positions[None] < limit[:, None])[None]

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of every token, fp32 ``[n, V]``; -inf for tokens that are never generated."""
        logits = self._model.decoder.logits(hidden).float()
        logits[:, list(self._model.spec.banned_ids)] = -torch.inf
        return logits.log_softmax(-1)

    def _judged(self, question: StandingQuestion, log_p: Sequence[Tensor]) -> TypedAnswer:
        choices = self._prompt(question).choices
        tokens = [choices.next_tokens(beginning) for beginning in choices.begun]
        values = [dict(zip(t, row[t].tolist(), strict=True)) for t, row in zip(tokens, log_p, strict=True)]
        found = choices.probabilities(values)
        mass = sum(found)
        equal = 1 / len(found)  # if even the mass underflows
        return TypedAnswer(question.choices, tuple(p / mass if mass else equal for p in found), min(1.0, mass))

    def _tokenised(self, question: StandingQuestion) -> _Prompt:
        tokenizer, spec = self._model.tokenizer, self._model.spec
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        ids = prompt_ids(tokenizer, [{"role": "user", "content": content}], special_tokens=spec.special_tokens)
        assert spec.image_id is not None
        at = ids.index(spec.image_id)
        choices = (tuple(tokenizer.encode(choice, add_special_tokens=False)) for choice in question.choices)
        return _Prompt(tuple(ids[:at]), tuple(ids[at + 1 :]), Choices(tuple(choices)))

    def _packed(self, questions: tuple[StandingQuestion, ...]) -> _Pack:
        forest, device = Forest(), self._model.device
        prompts = [self._prompt(question) for question in questions]
        nodes: list[list[int]] = []
        for prompt in prompts:
            answer = forest.add(prompt.after)
            nodes.append([forest.add(beginning, answer) for beginning in prompt.choices.begun])
        wanted = {node: place for place, node in enumerate(dict.fromkeys(node for own in nodes for node in own))}
        return _Pack(
            prompts[0].before,
            torch.tensor(forest.tokens, device=device),
            torch.tensor(forest.depths, device=device),
            torch.from_numpy(np.ascontiguousarray(forest.mask())).to(device),
            torch.tensor(list(wanted), device=device),
            tuple(tuple(wanted[node] for node in own) for own in nodes),
        )
