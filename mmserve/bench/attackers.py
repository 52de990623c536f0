"""Hostile clients for ``mmserve bench attacks``.

``python -m mmserve.bench.attackers ADDRESS NAME`` attacks until it is killed; it prints "begun" with its first
request.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

from mmserve.bench.hostile_constraints import hostile_constraints
from mmserve.bench.hostile_media import black_clip, large_png
from mmserve.bench.hostile_messages import empty_messages, repeated, silent_calls, unfinished_messages
from mmserve.client import Client, Options
from mmserve.errors import MMServeError

#: Seconds: timeout of an answer, time until a cancelled request is abandoned, pause between two rejected requests.
_PATIENCE, _LEFT_AFTER, _PAUSE = 60.0, 0.3, 0.05

#: Attacks the server at an address, without end.
Attack = Callable[[str], None]
Ask = Callable[[Client], Any]


def _again(address: str, asks: Sequence[Ask], timeout: float = _PATIENCE) -> None:
    """Send each request repeatedly, over a separate connection and in a separate thread."""

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
    """``file`` with a few bytes appended that decoders ignore, different each time to avoid cache hits."""
    for number in itertools.count():
        yield file + (16).to_bytes(4) + b"free" + number.to_bytes(8)


def _clips(width: int, height: int, *, timeout: float = _PATIENCE) -> Attack:
    """Five concurrent requests, each with two clips of 1,780 black frames of the given size."""

    def attack(address: str) -> None:
        clip = black_clip(width, height, 1780)
        _again(address, [_videos(_marked(clip)) for _ in range(5)], timeout)

    return attack


def _videos(files: Iterator[bytes]) -> Ask:
    return lambda client: client.generate("What moves?", videos=list(islice(files, 2)), max_new_tokens=16)


def _pictures(side: int, requests: int) -> Attack:
    """``requests`` concurrent requests, each with 11 pictures of ``side`` × ``side`` pixels."""

    def attack(address: str) -> None:
        picture = large_png(side)
        _again(address, [_images(_marked(picture)) for _ in range(requests)])

    return attack


def _images(files: Iterator[bytes]) -> Ask:
    return lambda client: client.generate("What is it?", list(islice(files, 11)), max_new_tokens=16)


def _messages(size: int) -> Attack:
    def attack(address: str) -> None:
        with repeated(address, empty_messages(size)):
            _begun()
            threading.Event().wait()

    return attack


def _unfinished(address: str) -> None:
    """60 calls that send nothing, and messages of 60 MB of which half is sent at once and the rest slowly."""
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
    """20 concurrent requests, each with a different regular expression for which a lexer needs ever more states."""
    _again(address, [_growing(i) for i in range(20)])


def _growing(salt: int) -> Ask:
    salts = itertools.count(1_000_000 * (salt + 1))

    def ask(client: Client) -> None:
        pattern = f"({next(salts)})?([abc]{{3,9}}[ab]{{4}}|[a-z ]*a[a-z ]{{16}})+"
        client.generate("Write.", regex=pattern, max_new_tokens=256, temperature=2.0)

    return ask


#: Attacks by name.
ATTACKS: dict[str, Attack] = {
    "long_clips": _clips(3840, 2160),
    "cancelled_clips": _clips(3840, 2160, timeout=_LEFT_AFTER),  # each request is cancelled soon
    "large_pictures": _pictures(8000, 2),
    "accepted_clips": _clips(1920, 1080),  # within the limits, as is the next
    "accepted_pictures": _pictures(4900, 3),
    "empty_messages_8mb": _messages(8_000_000),
    "empty_messages_60mb": _messages(60_000_000),
    "unfinished_messages": _unfinished,
    "long_repeats": _constraints("long_repeat"),
    "constraints": _constraints(),
    "growing_lexers": _growing_lexers,
}

if __name__ == "__main__":
    ATTACKS[sys.argv[2]](sys.argv[1])
