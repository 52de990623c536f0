"""Final tokens to final text: complete characters only, and possible stop strings held back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Self

import numpy as np
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from mmserve.core.candidates import Alternatives
from mmserve.core.canvas import MASKED, Canvas
from mmserve.core.events import Alternative, CommittedToken
from mmserve.core.payloads import TextState
from mmserve.decode.token_texts import beginning, token_bytes

#: The placeholder of a masked position in a snapshot.
MASK_GLYPH = "▒"


class TextStream:
    """Converts a growing sequence of final tokens to text; returned text is never retracted.

    ``within``: whether the text continues another one, so that a space before its first word is kept.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], *, within: bool = False) -> None:
        self.tokenizer, self._stop, self._within = tokenizer, stop, within
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._starts: list[int] = []  # length of the text before each token
        self._pending: list[int] = []  # last tokens, which do not form complete characters yet
        self._decoded = ""  # complete characters so far
        self._sent = 0
        self._begins = [0] * len(stop)  # for each stop string: start of the longest suffix that is a prefix of it
        self.stopped = False
        self.stop = ""  # the stop string that ended the text

    @classmethod
    def restored(
        cls, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], state: TextState, *, within: bool = False
    ) -> Self:
        """A stream that continues from ``state``."""
        made = cls(tokenizer, stop, within=within)
        for token in state.tokens:  # the decoder may hold bytes of an incomplete character
            made._add(token)
        made._decoded = state.text
        made._sent, made.stopped = state.sent, state.stopped
        return made

    def state(self) -> TextState:
        """The current state, as plain data."""
        return TextState(tuple(self._tokens), self._decoded, self._sent, self.stopped)

    @property
    def text(self) -> str:
        """All text so far, truncated before a stop string."""
        return self._decoded

    @property
    def tokens(self) -> int:
        """Number of tokens added so far."""
        return len(self._tokens)

    @property
    def covered_tokens(self) -> int:
        """Number of tokens that the text covers; a stop string may begin within the last one."""
        return bisect_left(self._starts, len(self._decoded)) if self.stopped else len(self._tokens)

    def push(self, tokens: np.ndarray) -> str:
        """Add the tokens that are new in ``tokens``, the answer from its start, and return the new final text."""
        for token in tokens[len(self._tokens) :].tolist():
            if self.stopped:
                break
            self._add(token)
            self._cut()
        return self._take(len(self._decoded) - self._held_back())

    def _add(self, token: int) -> None:
        """Take in ``token``."""
        self._tokens.append(token)
        self._starts.append(len(self._decoded))
        step = self._step(token)
        self._decoded += self._space + step if len(self._tokens) == 1 else step

    @property
    def _space(self) -> str:
        """The space before the first word, which the decoder drops."""
        if not self._within or not self._tokens:
            return ""
        [[spelled]] = token_bytes(self.tokenizer, np.array(self._tokens[:1])[None])
        return " " if beginning(self.tokenizer, self._tokens[0], spelled) != spelled else ""

    def _step(self, token: int) -> str:
        """The text that ``token`` completes.

        A byte-fallback decoder decodes a run of bytes as a whole, and to replacement characters if it is not valid
        UTF-8, even if a part of it was valid and already returned. That part is kept, and the run then begins after
        it.
        """
        self._pending.append(token)
        try:
            text = self._decoder.step(self.tokenizer.backend_tokenizer, token)
        except Exception:  # noqa: BLE001 - the tokenizers library raises nothing narrower
            self._decoder = DecodeStream(skip_special_tokens=True)
            steps = [self._decoder.step(self.tokenizer.backend_tokenizer, each) for each in self._pending]
            text = "".join(step or "" for step in steps)
        if text:
            self._pending = []
        return text or ""

    def advance(self, answer: np.ndarray, complete: bool, budget: int) -> tuple[str, str | None]:
        """New final text of ``answer``, its final tokens so far, and its finish reason, if it ended.

        ``complete``: no token follows; the answer then ended by an end token if it is shorter than ``budget``.
        """
        delta = self.push(answer)
        if not complete or self.stopped:
            return delta, "stop" if self.stopped else None
        delta += self.finish()
        return delta, "stop" if self.stopped else "length" if len(answer) == budget else "end"

    def finish(self) -> str:
        """The rest of the text: held-back text, and incomplete characters as replacement characters."""
        if not self.stopped:
            whole = self._space + _decode(self.tokenizer, self._tokens)
            if whole.startswith(self._decoded):
                self._decoded = whole
            else:
                self._decoded += _decode(self.tokenizer, self._pending)
            self._cut()
        return self._take(len(self._decoded))

    def _cut(self) -> None:
        found = [(at, stop) for stop in self._stop if (at := self._decoded.find(stop)) >= 0]
        if found:
            at, self.stop = min(found)
            self._decoded, self.stopped = self._decoded[:at], True

    def _held_back(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string.

        As the text grows, that suffix never begins further left, so no character is compared twice.
        """
        if self.stopped or not self._stop:
            return 0
        text = self._decoded
        for i, stop in enumerate(self._stop):
            at = max(self._begins[i], len(text) - len(stop) + 1)
            while not stop.startswith(text[at:]):
                found = text.find(stop[0], at + 1)
                at = len(text) if found < 0 else found
            self._begins[i] = at
        return len(text) - min(self._begins)

    def _take(self, until: int) -> str:
        new = self._decoded[self._sent : max(self._sent, until)]
        self._sent += len(new)
        return new


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def listed(
    tokenizer: PreTrainedTokenizerBase, found: Alternatives, *, within: bool = False
) -> list[tuple[Alternative, ...]]:
    """The alternatives of each position of an answer, with their texts and bytes; ``within``: see ``TextStream``."""
    spelled = token_bytes(tokenizer, found.tokens)
    tokens, log_probs = found.tokens.tolist(), found.log_probabilities.tolist()
    if tokens and not within:
        spelled[0] = [beginning(tokenizer, *one) for one in zip(tokens[0], spelled[0], strict=True)]
    return [
        tuple(Alternative(i, text_of(data), p, data) for i, data, p in zip(*row, strict=True) if p > -np.inf)
        for row in zip(tokens, spelled, log_probs, strict=True)
    ]


def text_of(data: bytes) -> str:
    """The text of a token with the bytes ``data``; a part of a character is U+FFFD."""
    return data.decode(errors="replace")


def speller(tokenizer: PreTrainedTokenizerBase) -> Callable[[np.ndarray], str]:
    """Decodes tokens (int64 ``[n]``) to text, including special tokens and all spaces."""
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))


def committed_tokens(
    canvas: Canvas,
    count: int,
    log_probabilities: np.ndarray,
    others: Alternatives | None,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
    *,
    within: bool = False,
) -> tuple[CommittedToken, ...]:
    """The answer's first ``count`` tokens as committed, without end tokens. ``log_probabilities`` is fp32 ``[N]``;
    ``others``: alternatives of the answer's positions; ``within``: see ``TextStream``."""
    content = ~np.isin(canvas.tokens[canvas.prompt_length :], list(end_ids))
    at = canvas.prompt_length + np.flatnonzero(content)[:count]
    return _tokens_at(canvas, at, log_probabilities, others, tokenizer, within=within)


def end_token(
    canvas: Canvas,
    count: int,
    log_probabilities: np.ndarray,
    others: Alternatives | None,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: frozenset[int],
) -> CommittedToken | None:
    """The end token after the answer's ``count`` tokens; None if there is none. Arguments as of
    ``committed_tokens``."""
    at = canvas.prompt_length + count
    if canvas.padded or at >= canvas.size or canvas.masked[at] or int(canvas.tokens[at]) not in end_ids:
        return None
    return _tokens_at(canvas, np.array([at]), log_probabilities, others, tokenizer, within=True)[0]


def _tokens_at(
    canvas: Canvas,
    at: np.ndarray,
    log_probabilities: np.ndarray,
    others: Alternatives | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    within: bool,
) -> tuple[CommittedToken, ...]:
    """The tokens at the positions ``at`` (int64, ascending); other arguments as of ``committed_tokens``."""
    own = at - canvas.prompt_length
    alternatives = listed(tokenizer, others.where(own), within=within) if others is not None else [()] * len(at)
    ids, steps, log_probs = canvas.tokens[at].tolist(), canvas.committed_at[at].tolist(), log_probabilities[at].tolist()
    spelled = [data for [data] in token_bytes(tokenizer, canvas.tokens[at, None])]
    spelled[:1] = [data if within else beginning(tokenizer, ids[0], data) for data in spelled[:1]]
    rows = zip(ids, spelled, log_probs, steps, alternatives, strict=True)
    return tuple(CommittedToken(i, text_of(data), p, step, more, data) for i, data, p, step, more in rows)


def canvas_text(canvas: Canvas, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> str:
    """The answer's canvas as text, with a glyph for each masked position; truncated at the first end token, if any."""
    tokens = canvas.tokens[canvas.prompt_length :]
    masked = canvas.committed_at[canvas.prompt_length :] == MASKED
    ends = np.flatnonzero(np.isin(tokens, list(end_ids)) & ~masked)
    stop = ends[0] if len(ends) and not canvas.padded else len(tokens)
    pieces: list[str] = []
    start = 0
    for cut in [*np.flatnonzero(np.diff(masked[:stop])) + 1, stop]:
        run = tokens[start:cut]
        if len(run):
            text = run[~np.isin(run, list(end_ids))].tolist()
            pieces.append(MASK_GLYPH * len(run) if masked[start] else _decode(tokenizer, text))
        start = cut
    return "".join(pieces)
