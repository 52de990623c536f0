"""Indexes of a session's requests and responses over all of its connections: pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

from mmserve.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from mmserve.video.messages import Credit, Numbered, both, ended_keys, join_key, response_bytes

#: How many times its credit a client may push beyond it before the session ends.
MOST_BEYOND = 10


class Requests:
    """Which requests a session has taken."""

    def __init__(self) -> None:
        self.taken = 0  # index of the last one

    def take(self, index: int) -> bool:
        """Whether the request ``index`` is new; False = it was taken before.

        Raises ``InvalidArgument`` where requests before it are missing.
        """
        if index < 1 or index > self.taken + 1:
            raise InvalidArgument.of("index", f"must be {self.taken + 1}, the one after the last taken, not {index}")
        if index <= self.taken:
            return False
        self.taken = index
        return True


class Window:
    """What a client may push: ``pushes`` of ``size`` bytes together wait at most.

    Credit is counted from the acknowledged index, and what a client has been allowed is never taken back.
    """

    def __init__(self, pushes: int, size: int) -> None:
        self._pushes, self._size = pushes, size
        self.waiting = 0
        self.bytes = 0
        self._beyond = 0  # pushes that had no credit

    @property
    def credit(self) -> Credit:
        """What may be pushed beyond what was."""
        return Credit(self._pushes - self.waiting, self._size - self.bytes)

    def push(self, size: int) -> bool:
        """Count a push of ``size`` bytes as waiting; False where there is no credit for it, and it is not to be taken.

        Raises ``ResourceExhausted`` for a client that goes on without credit.
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
        """A push of ``size`` bytes waits no longer."""
        self.waiting -= 1
        self.bytes -= size


@dataclass(frozen=True)
class _Sent:
    index: int
    response: Numbered
    size: int


class Responses:
    """Numbered responses on their way to a client: those not sent yet, and those sent that are not confirmed.

    Unsent ones are joined where that reports the same. Of sent ones at most ``kept_bytes`` are kept, the newest.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._unsent: OrderedDict[int, Numbered] = OrderedDict()  # by the order in which they came
        self._joined: dict[Hashable, int] = {}  # which of them others of the same key are joined with
        self._added = 0
        self.unsent_bytes = 0  # about how many bytes wait to be sent for the first time
        self._sent: deque[_Sent] = deque()
        self._next = 0  # of ``_sent``, to be sent on this connection
        self._index = 0  # of the last one sent
        self._forgotten = 0  # index of the last one that cannot be sent again
        self._bytes = 0  # of ``_sent``

    @property
    def confirmed(self) -> bool:
        """Whether the client has received everything."""
        return not self._unsent and not self._sent

    @property
    def pending(self) -> bool:
        """Whether there is something to be sent."""
        return self._next < len(self._sent) or bool(self._unsent)

    def add(self, response: Numbered) -> None:
        """Have ``response`` sent after those before it."""
        key = join_key(response)
        at = None if key is None else self._joined.get(key)
        if at is None:
            at = self._added = self._added + 1
            if key is not None:
                self._joined[key] = at
        else:
            before = self._unsent[at]
            self.unsent_bytes -= response_bytes(before)
            response = both(before, response)
        self._unsent[at] = response
        self.unsent_bytes += response_bytes(response)
        for ended in ended_keys(response, self._joined):
            self._joined.pop(ended, None)

    def send(self) -> tuple[int, Numbered] | None:
        """The next response to send, with its index; None = there is none now."""
        if self._next < len(self._sent):
            sent = self._sent[self._next]
        elif self._unsent:
            at, response = self._unsent.popitem(last=False)
            key = join_key(response)
            if key is not None and self._joined.get(key) == at:
                del self._joined[key]
            self._index += 1
            sent = _Sent(self._index, response, response_bytes(response))
            self.unsent_bytes -= sent.size
            self._sent.append(sent)
            self._bytes += sent.size
        else:
            return None
        self._next += 1
        while self._bytes > self._kept_bytes and self._next > 1:
            self._forgotten = self._drop()
        return sent.index, sent.response

    def clear(self) -> None:
        """Let go of everything: nothing is sent any more."""
        self._unsent.clear()
        self._joined.clear()
        self._sent.clear()
        self._next = self._bytes = self.unsent_bytes = 0

    def confirm(self, index: int) -> None:
        """The client has received everything up to ``index``; raises ``InvalidArgument`` where that was never sent."""
        if index > self._index:
            raise InvalidArgument.of("received", f"must be at most {self._index}, the last index sent, not {index}")
        while self._sent and self._sent[0].index <= index:
            self._drop()

    def resume(self, received: int) -> None:
        """Send everything after ``received`` once more; raises ``FailedPrecondition`` where that is not kept."""
        if received < self._forgotten:
            raise FailedPrecondition(
                f"responses up to {self._forgotten} are not kept any more, and only those up to {received} were "
                "received; confirm responses more often, and open a new session"
            )
        self.confirm(received)
        self._next = 0

    def _drop(self) -> int:
        """Forget the oldest of those sent, and return its index."""
        oldest = self._sent.popleft()
        self._bytes -= oldest.size
        self._next = max(0, self._next - 1)
        return oldest.index
