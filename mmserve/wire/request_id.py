"""``x-request-id``: the client's label of a request, in metadata in both directions and in the log.

Not unique: concurrent requests may have the same label.
"""

from __future__ import annotations

import uuid
from typing import Any

KEY = "x-request-id"
MAX_CHARACTERS = 128


def is_label(value: Any) -> bool:
    """Whether ``value`` is valid in metadata and logs: 1 to 128 printable ASCII characters."""
    return isinstance(value, str) and 0 < len(value) <= MAX_CHARACTERS and value.isascii() and value.isprintable()


def label_in(metadata: Any) -> str:
    """The label in a call's metadata if it is valid, else a new one."""
    given = next((value for key, value in metadata or () if key == KEY), "")
    return given if is_label(given) else uuid.uuid4().hex
