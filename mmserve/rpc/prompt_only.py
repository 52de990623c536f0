"""Requests for their prompt alone, for example for the log-probabilities of its tokens.

If these need a pass over the prompt, the engine answers with the one token that follows from it, which the client does
not get.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.core.events import Admitted, Event, Failed, Finished, Prefilled


def without_answer(event: Event) -> Event | None:
    """``event`` without anything of the answer; None for events of nothing else."""
    if isinstance(event, Finished):
        usage = replace(event.usage, completion_tokens=0)
        counts = event.forwards, event.recomputed_tokens, event.times
        return Finished("length", "", usage, *counts, event.warnings, sample=event.sample)
    return event if isinstance(event, Admitted | Prefilled | Failed) else None
