"""Conversion of errors for a session's responses."""

from __future__ import annotations

import logging

from mmserve.errors import Internal, MMServeError

logger = logging.getLogger("mmserve.video")


def reported(error: BaseException) -> MMServeError:
    """``error`` for a response; a bug becomes ``Internal`` with an id that is also in the log.

    A response is kept until its client confirms it, so its error must not reference tracebacks that hold pushed
    data.
    """
    typed = error if isinstance(error, MMServeError) else Internal.logged(error, "a session of video", logger)
    typed.__traceback__ = typed.__context__ = typed.__cause__ = None
    return typed
