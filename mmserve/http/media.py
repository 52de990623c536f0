"""Media in bodies: ``data:`` URLs. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii

from mmserve.errors import InvalidArgument
from mmserve.v1 import generation_pb2 as pb

#: What ``mmserve.v1.MediaService`` returns for an upload, in place of a URL.
MEDIA_ID = "sha256:"


def image(url: str, path: str) -> pb.ContentPart:
    """An image by its ``data:`` URL (base64) or media id; ``path``: the field, for errors."""
    if url.startswith(MEDIA_ID):
        return pb.ContentPart(image=pb.Image(media_id=url))
    return pb.ContentPart(image=pb.Image(data=_data(url, "image/", path)))


def video(url: str, path: str) -> pb.ContentPart:
    """A video by its ``data:`` URL (base64) or media id."""
    if url.startswith(MEDIA_ID):
        return pb.ContentPart(video=pb.Video(media_id=url))
    return pb.ContentPart(video=pb.Video(data=_data(url, "video/", path)))


def _data(url: str, kind: str, path: str) -> bytes:
    head, comma, payload = url.partition(",")
    scheme, _, rest = head.partition(":")
    if scheme.lower() != "data" or not comma:
        raise InvalidArgument.of(path, f"must be a data: URL or a media id; {scheme[:20]!r} URLs are not fetched")
    mime, *parameters = rest.split(";")
    if "base64" not in parameters or not mime.lower().startswith(kind):
        raise InvalidArgument.of(path, f"must begin with data:{kind}…;base64,")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise InvalidArgument.of(path, f"is no valid base64: {error}") from None
