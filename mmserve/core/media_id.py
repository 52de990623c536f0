"""Ids of uploaded media: the hash of their bytes."""

from __future__ import annotations

import hashlib
import re

_MEDIA_ID = re.compile(r"sha256:[0-9a-f]{64}")


def media_id_of(data: bytes) -> str:
    """The media id of ``data``: ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_media_id(value: str) -> bool:
    """Whether ``value`` has the form of a media id."""
    return _MEDIA_ID.fullmatch(value) is not None
