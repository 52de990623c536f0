"""Hostile clients for ``mmserve bench attacks``.

``python -m mmserve.bench.attackers ADDRESS NAME`` attacks until it is killed; it prints "begun" with its first request.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from mmserve.bench.hostile_constraints import hostile_constraints
from mmserve.bench.hostile_media import black_clip, large_png
from mmserve.bench.hostile_messages import empty_messages, repeated, silent_calls, unfinished_messages
from mmserve.client import Client, Options
from mmserve.errors import MMServeError

#: Seconds that an answer is waited for, until a cancelled request is left, and between two refused requests.
_PATIENCE, _LEFT_AFTER, _PAUSE = 60.0, 0.3, 0.05

#: Attacks the server at an address for ever.
Attack = Callable[[str], None]
Ask = Callable[[Client], Any]


def _again(address: str, asks: Sequence[Ask], timeout: float = _PATIENCE) -> None:
    """Ask each again and again, over a connection and on a thread each."""

    def loop(ask: Ask) -> None:
        with Client(address, timeout=timeout) as client:
            while True:
                try:
                    ask(client)
                except MMServeError:
                    time.sleep(_PAUSE)

    threads = [threading.Thread(target=loop, args=(ask,), daemon=True) for ask in asks]
    for thread in threads:
        thread.start()
    _begun()
    threads[0].join()


def _begun() -> None:
    print("begun", flush=True)


def _marked(file: bytes) -> Iterator[bytes]:
    """``file`` with a few bytes after its end that no decoder reads, each time others: no cache knows it."""
    for number in itertools.count():
        yield file + (16).to_bytes(4) + b"free" + number.to_bytes(8)


def _clips(clip: bytes, count: int) -> Ask:
    files = _marked(clip)
    return lambda client: client.generate("What moves?", videos=[next(files) for _ in range(count)], max_new_tokens=16)


def _pictures(picture: bytes, count: int) -> Ask:
    files = _marked(picture)
    return lambda client: client.generate("What is it?", [next(files) for _ in range(count)], max_new_tokens=16)


def _long_clips(address: str) -> None:
    """Five requests at once, each with two clips of 1,780 black frames of 3840 x 2160."""
    clip = black_clip(3840, 2160, 1780)
    _again(address, [_clips(clip, 2) for _ in range(5)])


def _cancelled_clips(address: str) -> None:
    """The same clips, each request cancelled soon."""
    clip = black_clip(3840, 2160, 1780)
    _again(address, [_clips(clip, 2) for _ in range(5)], timeout=_LEFT_AFTER)


def _large_pictures(address: str) -> None:
    """Two requests at once, each with 11 pictures of 8000 x 8000."""
    picture = large_png(8000)
    _again(address, [_pictures(picture, 11) for _ in range(2)])


def _accepted_clips(address: str) -> None:
    """Five requests at once, each with two clips of 1,780 black frames of 1920 x 1080, which the limits allow."""
    clip = black_clip(1920, 1080, 1780)
    _again(address, [_clips(clip, 2) for _ in range(5)])


def _accepted_pictures(address: str) -> None:
    """Three requests at once, each with 11 pictures of 4900 x 4900, which the limits allow."""
    picture = large_png(4900)
    _again(address, [_pictures(picture, 11) for _ in range(3)])


def _messages(size: int) -> Attack:
    def attack(address: str) -> None:
        with repeated(address, empty_messages(size)):
            _begun()
            threading.Event().wait()

    return attack


def _unfinished(address: str) -> None:
    """60 silent calls, and messages of 60 MB of which half is sent at once and the rest slowly."""
    with ExitStack() as stack:
        stack.enter_context(silent_calls(address))
        stack.enter_context(unfinished_messages(address, 60_000_000, sent=30_000_000, rate=1000.0, connections=8))
        _begun()
        threading.Event().wait()


def _constraints(*names: str) -> Attack:
    def attack(address: str) -> None:
        chosen = [hostile for hostile in hostile_constraints(0) if not names or hostile.name in names]
        wanted = [chosen[i % len(chosen)].name for i in range(max(6, len(chosen)))]
        _again(address, [_constraint(name, i) for i, name in enumerate(wanted)])

    return attack


def _constraint(name: str, salt: int) -> Ask:
    salts = itertools.count(1000 * salt)

    def ask(client: Client) -> None:
        options: Options = next(h.options for h in hostile_constraints(next(salts)) if h.name == name)
        client.generate("What is it?", **options)

    return ask


def _growing_lexers(address: str) -> None:
    """20 requests at once, each under an expression of its own for whose texts a lexer needs ever more states."""
    _again(address, [_growing(i) for i in range(20)])


def _growing(salt: int) -> Ask:
    salts = itertools.count(1_000_000 * (salt + 1))

    def ask(client: Client) -> None:
        pattern = f"({next(salts)})?([abc]{{3,9}}[ab]{{4}}|[a-z ]*a[a-z ]{{16}})+"
        client.generate("Write.", regex=pattern, max_new_tokens=256, temperature=2.0)

    return ask


#: Attacks by name.
ATTACKS: dict[str, Attack] = {
    "long_clips": _long_clips,
    "cancelled_clips": _cancelled_clips,
    "large_pictures": _large_pictures,
    "accepted_clips": _accepted_clips,
    "accepted_pictures": _accepted_pictures,
    "empty_messages_8mb": _messages(8_000_000),
    "empty_messages_60mb": _messages(60_000_000),
    "unfinished_messages": _unfinished,
    "long_repeats": _constraints("long_repeat"),
    "constraints": _constraints(),
    "growing_lexers": _growing_lexers,
}

if __name__ == "__main__":
    ATTACKS[sys.argv[2]](sys.argv[1])
