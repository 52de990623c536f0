"""Errors as a session reports them."""

from __future__ import annotations

import logging

from mmserve.errors import Internal, MMServeError

logger = logging.getLogger("mmserve.video")


def reported(error: BaseException) -> MMServeError:
    """``error`` for a response; a bug becomes ``Internal`` with an id that the log has too.

    A response is kept until its client has it, so its error must not refer to frames that hold what was pushed.
    """
    typed = error if isinstance(error, MMServeError) else Internal.logged(error, "a session of video", logger)
    typed.__traceback__ = typed.__context__ = typed.__cause__ = None
    return typed
