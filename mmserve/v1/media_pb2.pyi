from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class UploadMediaRequest(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class UploadMediaResponse(_message.Message):
    __slots__ = ("media_id", "bytes", "deduplicated")
    MEDIA_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEDUPLICATED_FIELD_NUMBER: _ClassVar[int]
    media_id: str
    bytes: int
    deduplicated: bool
    def __init__(self, media_id: _Optional[str] = ..., bytes: _Optional[int] = ..., deduplicated: bool = ...) -> None: ...
