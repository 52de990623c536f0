"""What a decoder reports while it works, so that its caller can end it or make it wait."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Who started a decoder; either method may raise to end it."""

    def reserve(self, pixels: int) -> None:
        """Called before so many pixels are decoded, and again where a clip's frames grow; may block."""
        ...

    def check(self) -> None:
        """Called after each frame that was decoded, by any thread."""
        ...


class Unwatched:
    """Lets every decoder work to its end."""

    def reserve(self, pixels: int) -> None:
        return

    def check(self) -> None:
        return


UNWATCHED = Unwatched()
