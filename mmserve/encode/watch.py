"""Callbacks of a decoder, with which its caller can stop or delay it."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Callbacks of the caller of a decoder; either method may raise to stop it."""

    def reserve(self, pixels: int) -> None:
        """Called before ``pixels`` are decoded, and again if a clip's frames become larger; may block."""
        ...

    def check(self) -> None:
        """Called after each decoded frame, by any thread."""
        ...


class Unwatched:
    """Never stops a decoder."""

    def reserve(self, pixels: int) -> None:
        return

    def check(self) -> None:
        return


UNWATCHED = Unwatched()
