"""The canvas on a terminal: one line on stderr, rewritten at each snapshot."""

from __future__ import annotations

import shutil
import sys


def empty_note(reason: str) -> str:
    """The note shown in place of an empty answer with the finish reason ``reason``."""
    return f"(the answer is empty: {'the model ended at once' if reason == 'end' else f'finish reason {reason!r}'})"


class CanvasLine:
    """Shows a canvas in place on a terminal; does nothing if stderr is not a terminal (``live`` is False)."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line with ``text``, truncated to the terminal's width."""
        if self.live:
            width = shutil.get_terminal_size().columns - 3
            line = text.replace("\n", " ")
            sys.stderr.write("\r\x1b[2K  " + (line if len(line) <= width else line[: width - 1] + "…"))
            sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line."""
        if self.live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
