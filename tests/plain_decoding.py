"""Diffusion decoding written down plainly: one request, dense attention, a loop over steps, no store, no batch.

The oracle of the engine's tests. It knows the decoder's layers and the sampler's noise (drawn tokens depend on it),
and nothing else of the package: caches are one K and one V array a layer, of which a step overwrites the rows it
runs; each recompute and each commit policy is written out again from METHODS.md and the references named there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from mmserve_kernels.rope_scatter import rotate
from torch import Tensor

from mmserve.core.canvas import MASKED, PROMPT, Canvas
from mmserve.core.encoded import Encoded
from mmserve.core.request import Policy, Request
from mmserve.decode.pace import random_order
from mmserve.decode.sampler import candidates
from mmserve.models.base import LoadedModel


@dataclass(frozen=True)
class Step:
    """One forward pass: the positions run, and what became final after it."""

    run: tuple[int, ...]
    committed: dict[int, int]  # position → token
    log_probabilities: dict[int, float]  # of the same positions


#: What two computations of a logit may differ by.
ROUNDING = 2e-5


@dataclass
class History:
    """A canvas from its first step to its last."""

    tokens: np.ndarray  # int64 [N]
    committed_at: np.ndarray  # int64 [N]: -1 = prompt, MASKED = never
    prompt_length: int
    steps: list[Step] = field(default_factory=list)
    tied: bool = False  # a draw was so close that rounding decides it

    @property
    def recomputed(self) -> int:
        return sum(len(step.run) for step in self.steps)

    def log_probability(self, position: int) -> float:
        return next(s.log_probabilities[position] for s in self.steps if position in s.committed)


@dataclass(frozen=True)
class Proposal:
    """The candidates of a step, by position."""

    token: dict[int, int]
    confidence: dict[int, float]
    gap: dict[int, float]
    entropy: dict[int, float]
    log_probability: dict[int, float]
    final_gap: dict[int, float]  # of final positions that were run
    tied: bool  # other tokens would have been drawn from logits that differ by rounding


# --- LLaDA's schedule -----------------------------------------------------------------------------------------------


def llada_counts(masks: int, steps: int) -> list[int]:
    """Tokens of each step of a block: masks // steps, and one more in the first masks % steps of them."""
    return [k for k in (masks // steps + (i < masks % steps) for i in range(steps)) if k]


def block_counts(length: int, block_length: int, steps: int) -> list[list[int]]:
    """Tokens of each step of each block. LLaDA divides equal blocks only; ragged ones share the steps by length.

    After the positions 0 … p - 1 of ``length``, steps * p // length steps are over; a block has one step at least.
    """
    steps = steps or length
    starts = list(range(0, length, block_length))
    ends = [*starts[1:], length]
    shares = [steps * end // length - steps * start // length for start, end in zip(starts, ends, strict=True)]
    return [llada_counts(end - start, max(1, n)) for start, end, n in zip(starts, ends, shares, strict=True)]


# --- the loop -------------------------------------------------------------------------------------------------------


class PlainDecoder:
    """Decodes one request; ``decode`` is the loop."""

    def __init__(self, model: LoadedModel, encoded: Encoded, request: Request) -> None:
        self.model, self.request, self.spec = model, request, model.spec
        self.prompt = len(encoded.ids)
        self.new = request.sampling.max_new_tokens
        self.size = self.prompt + self.new
        self.block_length = min(self.spec.block_length(request.diffusion.block_length), self.new)
        self.counts = block_counts(self.new, self.block_length, request.diffusion.steps)
        self.encoded = encoded
        self.tokens = np.concatenate([encoded.ids, np.full(self.new, self.spec.mask_id)]).astype(np.int64)
        self.committed_at = np.array([PROMPT] * self.prompt + [MASKED] * self.new, dtype=np.int64)
        config = model.decoder.config
        shape = (config.num_layers, self.size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.blind = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.forwards = 0
        self.block = self.block_step = 0
        self.rng_order: list[int] = []

    # where things are

    @property
    def start(self) -> int:
        return self.prompt + self.block * self.block_length

    @property
    def end(self) -> int:
        return min(self.start + self.block_length, self.size)

    def masked(self, start: int = 0, end: int | None = None) -> list[int]:
        return [p for p in range(start, self.size if end is None else end) if self.committed_at[p] == MASKED]

    def canvas(self) -> Canvas:
        """The package's canvas in this state, for the two functions of the package that draw: order and noise."""
        return Canvas(
            self.tokens.copy(),
            self.committed_at.copy(),
            self.prompt,
            self.block_length,
            self.start,
            self.forwards,
            self.block_step,
            origin=self.prompt,
        )

    # one step

    @torch.inference_mode()
    def decode(self) -> History:
        history = History(self.tokens, self.committed_at, self.prompt)
        while not self.complete():
            if self.block_step == 0:
                self.rng_order = random_order(self.canvas(), self.request.sampling.seed).tolist()
            run = self.rows(self.request.diffusion.recompute)
            proposal = self.propose(run, self.run(run))
            self.forwards += 1
            self.block_step += 1
            chosen = self.choose(self.request.diffusion.commit, proposal)
            assert chosen, "a step must commit something"
            for p in chosen:
                assert self.committed_at[p] == MASKED
                self.tokens[p], self.committed_at[p] = proposal.token[p], self.forwards
            history.tied |= proposal.tied
            history.steps.append(
                Step(
                    tuple(run),
                    {p: proposal.token[p] for p in sorted(chosen)},
                    {p: proposal.log_probability[p] for p in chosen},
                )
            )
            while self.start < self.size and not self.masked(self.start, self.end):
                self.block, self.block_step = self.block + 1, 0
        return history

    def complete(self) -> bool:
        """No mask is left, or none left of the first end token."""
        for p in range(self.prompt, self.size):
            if self.committed_at[p] == MASKED:
                return False
            if self.tokens[p] in self.spec.end_ids:
                return True
        return True

    def run(self, rows: list[int]) -> Tensor:
        """Logits ``[rows, V]`` (fp64); the rows' keys and values are kept, all others are as they were left.

        LLaDA's classifier-free guidance runs them again with masks for the prompt.
        """
        scale, shown = self.request.diffusion.cfg_scale, self.run_one(rows, self.keys, self.values)
        if not scale:
            return shown
        without = self.run_one(rows, *self.blind, blind=True)
        return without + (scale + 1) * (shown - without)

    def run_one(self, rows: list[int], kept_keys: Tensor, kept_values: Tensor, *, blind: bool = False) -> Tensor:
        """Logits of one sequence: the request's own, or the one whose prompt is masks."""
        ids = torch.from_numpy(self.tokens.copy())
        if blind:
            ids[: self.prompt] = self.spec.mask_id
        ids[torch.from_numpy(self.encoded.image_rows)] = self.spec.mask_id
        embedded = self.model.decoder.embed(ids)
        if self.encoded.features is not None and not blind:
            embedded[torch.from_numpy(self.encoded.image_rows)] = self.encoded.features
        at = torch.tensor(rows)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            kept_keys[layer][at], kept_values[layer][at] = k, v
            per_group = q.shape[1] // k.shape[1]
            keys = kept_keys[layer].repeat_interleave(per_group, 1).double()
            values = kept_values[layer].repeat_interleave(per_group, 1).double()
            weights = (torch.einsum("qhd,khd->hqk", q.double(), keys) / q.shape[-1] ** 0.5).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

        hidden = self.model.decoder(embedded[at], at, attend)
        logits = self.model.decoder.logits(hidden).double()
        assert not logits.isnan().any(), "a row was read from the cache that nothing had written"
        return logits

    def propose(self, rows: list[int], logits: Tensor) -> Proposal:
        """A candidate for each masked position that was run: of the block, or of the canvas for a far answer."""
        whole = self.looks_past_the_block(self.request.diffusion.commit)
        wanted = set(self.masked() if whole else self.masked(self.start, self.end))
        positions = [p for p in rows if p in wanted]
        every, logits = logits, logits[[rows.index(p) for p in positions]]
        sampling = self.request.sampling
        drawn: list[int] = []
        tied = False
        if sampling.temperature > 0:
            at = np.array(positions, dtype=np.int64)
            nearly = torch.where(torch.arange(logits.shape[1]) % 2 == 0, ROUNDING, -ROUNDING)
            drawn, *others = (
                candidates(
                    shown.float(), at, self.canvas(), sampling, self.spec.banned_ids, end_ids=self.spec.end_ids
                ).tokens.tolist()
                for shown in (logits, logits + nearly, logits - nearly)
            )
            tied = others != [drawn, drawn]
        whole = (
            logits.clone()
        )  # LLaDA: probabilities are among all tokens, the mask with them, though it is never chosen
        logits[:, list(self.spec.banned_ids)] = -torch.inf
        for row in logits:
            self.penalised(row)
        tokens = drawn or logits.argmax(-1).tolist()
        chosen_max = logits.max(-1).values
        logits[:, self.spec.mask_id] = whole[:, self.spec.mask_id]
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        entropy = torch.where(p > 0, -p * log_p, 0.0).sum(-1).tolist()
        top = logits.sort(-1, descending=True).values
        other = torch.where(chosen_max == top[:, 0], top[:, 1], top[:, 0])
        gap = (chosen_max - other).tolist()  # below 0 where the mask has the highest logit
        chosen = [float(log_p[i, token]) for i, token in enumerate(tokens)]
        confidence = [float(np.float32(np.exp(value))) for value in chosen]
        figures = (dict(zip(positions, of, strict=True)) for of in (tokens, confidence, gap, entropy, chosen))
        return Proposal(*figures, self.final_gaps(rows, every), tied)

    def final_gaps(self, rows: list[int], logits: Tensor) -> dict[int, float]:
        """The gap at each final position of the answer that was run: of the highest logit that may be chosen."""
        gaps = {}
        for p, row in zip(rows, logits, strict=True):
            if p >= self.prompt and self.committed_at[p] != MASKED:
                shown = self.penalised(row.clone())
                mask = float(shown[self.spec.mask_id])
                shown[list(self.spec.banned_ids)] = -torch.inf
                best, second = shown.sort(descending=True).values[:2].tolist()
                gaps[p] = best - max(second, mask)
        return gaps

    def penalised(self, row: Tensor) -> Tensor:
        """A row of logits with the bias, and with those of the tokens already on the canvas made smaller, in place."""
        sampling = self.request.sampling
        for token, bias in sampling.logit_bias.items():
            row[token] += bias
        answer = [int(t) for p, t in enumerate(self.tokens) if p >= self.prompt and self.committed_at[p] != MASKED]
        answer = [token for token in answer if token not in self.spec.end_ids]
        penalty = sampling.repetition_penalty
        known = {*(int(t) for t in self.tokens[: self.prompt]), *answer}
        for token in known if penalty != 1 else ():
            if token < len(row):
                row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        for token in set(answer):
            row[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
        return row

    # which positions a step runs: METHODS 1, "one view of all caches"

    def rows(self, policy: Policy) -> list[int]:
        i, start, end = self.block_step, self.start, self.end
        everything = list(range(self.size))
        refresh = int(policy.options.get("refresh", {"dkv_decode": 8, "dkv_greedy": 2}.get(policy.name, 1)))
        if self.forwards == 0 or policy.name == "none":
            return everything
        if policy.name == "prefix":
            return everything if i == 0 else list(range(start, self.size))
        if policy.name == "dual":
            return everything if i == 0 else list(range(start, end))
        if policy.name == "free_cache":
            return list(range(start, self.size))
        if policy.name == "dkv_decode":
            # T_(i-2): known after the step before the last. What was decoded since carries the last step's number.
            known_earlier = {p for p in everything if self.committed_at[p] < self.forwards}
            return everything if i < 2 or i % refresh == 0 else [p for p in everything if p not in known_earlier]
        if policy.name == "dkv_greedy":
            return everything if i % refresh == 0 else self.greedy_rows(int(policy.options.get("window", 4)))
        raise KeyError(policy.name)

    def greedy_rows(self, window: int) -> list[int]:
        """{to decode now} ∪ {decoded last} ∪ {masked neighbours of the former, nearest first, left before right}."""
        due = [p for p in self.rng_order if self.committed_at[p] == MASKED][: self.scheduled()]
        rows = {*due, *(p for p in range(self.size) if self.committed_at[p] == self.forwards)}
        for p in due:
            beside = [q for distance in range(1, self.size) for q in (p - distance, p + distance)]
            free = [q for q in beside if 0 <= q < self.size and self.committed_at[q] == MASKED and q not in rows]
            rows |= set(free[:window])
        return sorted(rows)

    def scheduled(self, done: int | None = None) -> int:
        """Tokens that step ``done`` (from 0; default: the next) of the block commits by LLaDA's schedule."""
        counts = self.counts[self.block]
        done = self.block_step if done is None else done
        return counts[done] if done < len(counts) - 1 else self.block_length

    def own_steps(self) -> int:
        return len(self.counts[self.block])

    def last_step(self) -> bool:
        """Whether the pass just made is the last that the block's schedule has."""
        return self.block_step >= self.own_steps()

    def to_grid(self) -> int:
        """Dimple: tokens down to the next point of a grid that falls evenly from all of the block to nothing."""
        steps, length = self.own_steps(), self.end - self.start
        left = len(self.masked(self.start, self.end))
        points = [length * Fraction(steps - i, steps) for i in range(self.block_step, steps)]
        return next((n for point in points if (n := math.floor(left - point)) >= 1), left)

    # which candidates become final

    def looks_past_the_block(self, policy: Policy) -> bool:
        return policy.name == "early_commit" and policy.options.get("answer_length", 0) > 0

    def choose(self, policy: Policy, proposal: Proposal) -> list[int]:
        if policy.name == "early_commit":
            if self.sure(policy, proposal):
                return list(proposal.token)
            policy = policy.base or Policy(name="low_confidence")
        inside = [p for p in proposal.token if p < self.end]
        ranked = sorted(inside, key=lambda p: (-proposal.confidence[p], p))
        count = self.scheduled(self.block_step - 1)
        options = policy.options
        if policy.name == "low_confidence":
            return ranked[:count]
        if policy.name == "random":
            return [p for p in self.rng_order if p in proposal.token and p in inside][:count]
        if policy.name == "threshold":
            limit = float(np.float32(options.get("confidence", 0.9)))
            return [p for p in ranked if proposal.confidence[p] >= limit] or ranked[:1]
        if policy.name == "factor":
            factor = options.get("factor", 1.0)
            sizes = [n for n, p in enumerate(ranked, 1) if proposal.confidence[p] >= 1 - factor / (n + 1)]
            return ranked[: max(sizes, default=1)]
        if policy.name == "confident":
            limit = float(np.float32(options.get("confidence", 0.95)))
            certain = [p for p in ranked if proposal.confidence[p] > limit]
            return certain if certain and not self.last_step() else ranked[: self.to_grid()]
        if policy.name == "entropy_bound":
            calm = sorted(inside, key=lambda p: (proposal.entropy[p], p))
            bound = options.get("bound", 0.1)
            sizes = [
                n
                for n in range(1, len(calm) + 1)
                if sum(map(proposal.entropy.__getitem__, calm[:n])) - proposal.entropy[calm[n - 1]] <= bound
            ]
            return calm[: max(sizes, default=1)]
        raise KeyError(policy.name)

    def sure(self, policy: Policy, proposal: Proposal) -> bool:
        """Prophet: whether the mean gap over the answer's positions reaches what this far into the steps will do.

        The mean is over final positions too, as far as they were run. The reference counts the steps from 1 and changes
        its demand at 0.33 and 0.67 of them. An answer of which an open position was not run is in doubt; what is behind
        an end of text is no answer.
        """
        length = int(policy.options.get("answer_length", 0))
        first = self.prompt + int(policy.options.get("answer_start", 0))
        answer = range(first, min(first + length, self.size)) if length else range(self.start, self.end)
        if policy.options.get("answer_after"):
            first = self.behind(str(policy.options["answer_after"]))
            answer = range(first, min(first + length, self.size)) if length else range(max(first, self.start), self.end)
            if not answer:
                return False
        over = next((p for p in answer if self.thought(p, proposal) in self.spec.end_ids), self.size)
        still_open = [p for p in answer if self.committed_at[p] == MASKED and p <= over]
        if not all(p in proposal.gap for p in still_open):
            return False
        if policy.options.get("mistakes"):
            return sum(1 / (1 + math.exp(proposal.gap[p])) for p in still_open) <= policy.options["mistakes"]
        progress = self.forwards / (self.request.diffusion.steps or self.new)
        phase = "early" if progress < 0.33 else "middle" if progress < 0.67 else "late"
        needed = policy.options.get(phase, {"early": 7.5, "middle": 5.0, "late": 2.5}[phase])
        gaps = [g for of in (proposal.gap, proposal.final_gap) for p, g in of.items() if p in answer and p <= over]
        return bool(gaps) and sum(gaps) / len(gaps) >= needed

    def thought(self, position: int, proposal: Proposal) -> int:
        """The token that is proposed for a position, or stands there."""
        return proposal.token.get(position, int(self.tokens[position]))

    def behind(self, text: str) -> int:
        """The first position left of which committed tokens, next to one another, read ``text``; the end for none."""
        for end in range(self.prompt + 1, self.size + 1):
            for start in range(end - 1, self.prompt - 1, -1):
                if self.committed_at[start] == MASKED:
                    break
                if text in self.model.tokenizer.decode(self.tokens[start:end].tolist()):
                    return end
        return self.size


def plain_decoding(model: LoadedModel, encoded: Encoded, request: Request) -> History:
    """The history of ``request``'s canvas, ``encoded`` its prompt."""
    return PlainDecoder(model, encoded, request).decode()
