from mmserve.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_KIND_UNSPECIFIED: _ClassVar[CacheKind]
    CACHE_KIND_PREFIX: _ClassVar[CacheKind]
    CACHE_KIND_VISUAL: _ClassVar[CacheKind]
CACHE_KIND_UNSPECIFIED: CacheKind
CACHE_KIND_PREFIX: CacheKind
CACHE_KIND_VISUAL: CacheKind

class CacheEntry(_message.Message):
    __slots__ = ("id", "kind", "model", "tenant", "tokens", "sizes", "hits", "pinned", "workers", "stale")
    class SizesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: CacheKind
    model: str
    tenant: str
    tokens: int
    sizes: _containers.ScalarMap[str, int]
    hits: int
    pinned: bool
    workers: _containers.RepeatedScalarFieldContainer[str]
    stale: bool
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[_Union[CacheKind, str]] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., tokens: _Optional[int] = ..., sizes: _Optional[_Mapping[str, int]] = ..., hits: _Optional[int] = ..., pinned: bool = ..., workers: _Optional[_Iterable[str]] = ..., stale: bool = ...) -> None: ...

class ListEntriesRequest(_message.Message):
    __slots__ = ("model", "kind")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    model: str
    kind: CacheKind
    def __init__(self, model: _Optional[str] = ..., kind: _Optional[_Union[CacheKind, str]] = ...) -> None: ...

class ListEntriesResponse(_message.Message):
    __slots__ = ("entries", "sizes")
    class SizesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[CacheEntry]
    sizes: _containers.ScalarMap[str, int]
    def __init__(self, entries: _Optional[_Iterable[_Union[CacheEntry, _Mapping]]] = ..., sizes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PinEntriesRequest(_message.Message):
    __slots__ = ("ids", "model")
    IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class PinEntriesResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class UnpinEntriesRequest(_message.Message):
    __slots__ = ("ids", "model")
    IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class UnpinEntriesResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class DropEntriesRequest(_message.Message):
    __slots__ = ("ids", "model")
    IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class DropEntriesResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("request", "pin")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    request: _generation_pb2.GenerateRequest
    pin: bool
    def __init__(self, request: _Optional[_Union[_generation_pb2.GenerateRequest, _Mapping]] = ..., pin: bool = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "visual_tokens", "id")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VISUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    visual_tokens: int
    id: str
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., visual_tokens: _Optional[int] = ..., id: _Optional[str] = ...) -> None: ...
