"""``x-request-id``: the client's own name for a request, in metadata both ways and in the log.

Only a label: two requests may carry the same one at once.
"""

from __future__ import annotations

import uuid
from typing import Any

KEY = "x-request-id"
MAX_CHARACTERS = 128


def is_label(value: Any) -> bool:
    """Whether ``value`` is fit for metadata and logs: 1 to 128 printable ASCII characters."""
    return isinstance(value, str) and 0 < len(value) <= MAX_CHARACTERS and value.isascii() and value.isprintable()


def label_in(metadata: Any) -> str:
    """The label in a call's metadata where it is fit, else a fresh one."""
    given = next((value for key, value in metadata or () if key == KEY), "")
    return given if is_label(given) else uuid.uuid4().hex
