"""Indices of a session's requests and responses, over all its connections: pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

from mmserve.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from mmserve.video.messages import Credit, Numbered, both, completed_keys, merge_key, response_bytes

#: Multiple of its credit that a client may push without credit before the session ends.
MOST_BEYOND = 10


class Requests:
    """The requests that a session has received."""

    def __init__(self) -> None:
        self.taken = 0  # index of the last one

    def take(self, index: int) -> bool:
        """Whether the request ``index`` is new; False = it was received before.

        Raises ``InvalidArgument`` if preceding requests are missing.
        """
        if index < 1 or index > self.taken + 1:
            raise InvalidArgument.of("index", f"must be {self.taken + 1}, the one after the last received, not {index}")
        if index <= self.taken:
            return False
        self.taken = index
        return True


class Window:
    """Flow control of pushes: at most ``pushes`` of ``size`` total bytes may wait.

    Credit is relative to the acknowledged index, and is never reduced.
    """

    def __init__(self, pushes: int, size: int) -> None:
        self._pushes, self._size = pushes, size
        self.waiting = 0
        self.bytes = 0
        self._beyond = 0  # pushes without credit

    @property
    def credit(self) -> Credit:
        """The current credit."""
        return Credit(self._pushes - self.waiting, self._size - self.bytes)

    def push(self, size: int) -> bool:
        """Count a push of ``size`` bytes as waiting. Returns False, without counting it, if there is no credit for it.

        Raises ``ResourceExhausted`` for a client that repeatedly pushes without credit.
        """
        credit = self.credit
        if credit.pushes >= 1 and credit.bytes >= size:
            self.waiting += 1
            self.bytes += size
            return True
        self._beyond += 1
        if self._beyond > MOST_BEYOND * self._pushes:
            raise ResourceExhausted(
                f"{self._beyond} pushes were sent without credit; wait for `credit` before pushing more"
            )
        return False

    def done(self, size: int) -> None:
        """A push of ``size`` bytes is no longer waiting."""
        self.waiting -= 1
        self.bytes -= size


@dataclass(frozen=True)
class _Sent:
    index: int
    response: Numbered
    size: int


class Responses:
    """Numbered responses to a client: unsent ones, and sent ones that are not confirmed.

    Unsent responses are merged if that is equivalent. Of sent ones the newest ``kept_bytes`` are kept.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._unsent: OrderedDict[int, Numbered] = OrderedDict()  # by the order in which they came
        self._mergeable: dict[Hashable, int] = {}  # indices of those that others with the same key can be merged with
        self._added = 0
        self.unsent_bytes = 0  # approximate bytes not sent yet
        self._sent: deque[_Sent] = deque()
        self._next = 0  # index in ``_sent`` of the next one for this connection
        self._index = 0  # index of the last one sent
        self._dropped_up_to = 0  # index of the last one that cannot be sent again
        self._bytes = 0  # of ``_sent``

    @property
    def confirmed(self) -> bool:
        """Whether the client has confirmed everything."""
        return not self._unsent and not self._sent

    @property
    def pending(self) -> bool:
        """Whether there is a response to send."""
        return self._next < len(self._sent) or bool(self._unsent)

    def add(self, response: Numbered) -> None:
        """Queue ``response``."""
        key = merge_key(response)
        at = None if key is None else self._mergeable.get(key)
        if at is None:
            at = self._added = self._added + 1
            if key is not None:
                self._mergeable[key] = at
        else:
            before = self._unsent[at]
            self.unsent_bytes -= response_bytes(before)
            response = both(before, response)
        self._unsent[at] = response
        self.unsent_bytes += response_bytes(response)
        for ended in completed_keys(response, self._mergeable):
            self._mergeable.pop(ended, None)

    def send(self) -> tuple[int, Numbered] | None:
        """The next response to send, with its index; None if there is none."""
        if self._next < len(self._sent):
            sent = self._sent[self._next]
        elif self._unsent:
            at, response = self._unsent.popitem(last=False)
            key = merge_key(response)
            if key is not None and self._mergeable.get(key) == at:
                del self._mergeable[key]
            self._index += 1
            sent = _Sent(self._index, response, response_bytes(response))
            self.unsent_bytes -= sent.size
            self._sent.append(sent)
            self._bytes += sent.size
        else:
            return None
        self._next += 1
        while self._bytes > self._kept_bytes and self._next > 1:
            self._dropped_up_to = self._drop()
        return sent.index, sent.response

    def clear(self) -> None:
        """Drop all responses."""
        self._unsent.clear()
        self._mergeable.clear()
        self._sent.clear()
        self._next = self._bytes = self.unsent_bytes = 0

    def confirm(self, index: int) -> None:
        """The client has received everything up to ``index``; raises ``InvalidArgument`` if that was never sent."""
        if index > self._index:
            raise InvalidArgument.of("received", f"must be at most {self._index}, the last index sent, not {index}")
        while self._sent and self._sent[0].index <= index:
            self._drop()

    def resume(self, received: int) -> None:
        """Send everything after ``received`` again; raises ``FailedPrecondition`` if that is not kept."""
        if received < self._dropped_up_to:
            raise FailedPrecondition(
                f"responses up to {self._dropped_up_to} are not kept any more, and only those up to {received} were "
                "received; confirm responses more often, and open a new session"
            )
        self.confirm(received)
        self._next = 0

    def _drop(self) -> int:
        """Drop the oldest sent response. Returns its index."""
        oldest = self._sent.popleft()
        self._bytes -= oldest.size
        self._next = max(0, self._next - 1)
        return oldest.index
