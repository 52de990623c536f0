"""The result of ``generate``, from the events that a request finished with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, cast

from mmserve.client.schemas import Schema, reader
from mmserve.core import events
from mmserve.errors import Unavailable
from mmserve.video.clock import Moment

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # ``Result`` alone is ``Result[Any]``
else:
    from typing import TypeVar

    T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result(Generic[T]):
    """A finished answer; ``finish_reason`` is ``end``, ``stop`` or ``length``, ``times`` are milliseconds.

    Of a request for several samples it is the first; ``samples`` are all of them.
    """

    text: str
    finish_reason: str
    usage: events.Usage
    forwards: int
    tokens_per_forward: float
    recomputed_tokens: int
    times: events.StageTimes
    warnings: tuple[str, ...]
    edits: int
    tokens: tuple[events.CommittedToken, ...]
    request_id: str
    closed_by_budget: bool = False  # a constrained answer was made shorter than the model's, so that it ends in time
    companion_forwards: int = 0  # passes of a companion, which ``forwards`` does not count
    log_weight: float | None = None  # importance weight (natural log) of an answer drawn by "awrs" or "asap"
    constraint: events.ConstraintStats | None = None  # what its constraint took, if it had one
    holes: tuple[str, ...] = ()  # what fills each hole of a ``template``; none where a stop string cut the answer
    moments: tuple[Moment, ...] = ()  # of an answer about a video session: times that its text names
    others: tuple[Result[T], ...] = ()  # the samples behind the first
    read: Callable[[str], T] | None = field(default=None, repr=False, compare=False)  # of an answer to a ``schema``

    @property
    def samples(self) -> tuple[Result[T], ...]:
        """Every sample in order, this one first."""
        return (self, *self.others)

    @property
    def parsed(self) -> T:
        """The answer to a request with ``schema``: a value, or an instance of its class; None without one, and where a
        stop string cut the answer. Raises what the class raises, if it asks for more than its schema says."""
        return cast(T, None) if self.read is None or self.finish_reason == "stop" else self.read(self.text)


def to_result(
    done: Sequence[events.Finished],
    samples: int,
    request_id: str,
    schema: Schema | None = None,
    moments: Mapping[int, tuple[Moment, ...]] | None = None,
) -> Result[Any]:
    """The result in what a stream of ``samples`` finished with, in any order; raises ``Unavailable`` where one is
    missing. ``schema``: the request's; ``moments``: of an answer about a video session, by sample."""
    if sorted(event.sample for event in done) != list(range(samples)):
        raise Unavailable("the server ended the stream without an answer")
    read = reader(schema)
    first, *others = (
        replace(_result(event, request_id, read), moments=(moments or {}).get(event.sample, ()))
        for event in sorted(done, key=lambda event: event.sample)
    )
    return replace(first, others=tuple(others))


def _result(event: events.Finished, request_id: str, read: Callable[[str], Any] | None) -> Result[Any]:
    return Result(
        text=event.text,
        finish_reason=event.reason,
        usage=event.usage,
        forwards=event.forwards,
        tokens_per_forward=event.tokens_per_forward,
        recomputed_tokens=event.recomputed_tokens,
        times=event.times,
        warnings=event.warnings,
        edits=event.edits,
        tokens=event.tokens,
        request_id=request_id,
        closed_by_budget=event.closed_by_budget,
        companion_forwards=event.companion_forwards,
        log_weight=event.log_weight,
        constraint=event.constraint,
        holes=event.holes,
        read=read,
    )
