from __future__ import annotations

import contextlib
import hashlib
import threading

import pytest

from mmserve.core.media_id import is_media_id, media_id_of
from mmserve.encode.store import MediaStore
from mmserve.errors import NotFound, ResourceExhausted


def test_ids_are_hashes() -> None:
    stored = MediaStore(10).put(b"abc")
    assert stored.media_id == media_id_of(b"abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert is_media_id(stored.media_id)
    for other in (
        "",
        "sha256:",
        stored.media_id.upper(),
        stored.media_id + "0",
        stored.media_id + "\n",
        "md5:" + "0" * 64,
    ):
        assert not is_media_id(other)


def test_the_same_bytes_are_kept_once() -> None:
    store = MediaStore(10)
    assert not store.put(b"abc").deduplicated
    assert store.put(b"abc").deduplicated
    assert (len(store), store.used) == (1, 3)


def test_least_recently_used_goes_first() -> None:
    store = MediaStore(9)
    a, b, c = (store.put(data).media_id for data in (b"aaa", b"bbb", b"ccc"))
    store.get(a)
    store.put(b"bbb")  # putting again is a use too
    store.put(b"dd")
    assert store.get(a) and store.get(b)
    with pytest.raises(NotFound, match=c):
        store.get(c)
    store.put(b"9" * 9)
    assert (len(store), store.used) == (1, 9)


def test_too_large_for_the_store() -> None:
    store = MediaStore(3)
    kept = store.put(b"abc").media_id
    with pytest.raises(ResourceExhausted) as caught:
        store.put(b"abcd")
    assert caught.value.retry_after is None
    assert store.get(kept) == b"abc"


def test_threads() -> None:
    store = MediaStore(500)

    def work(seed: int) -> None:
        for i in range(300):
            media_id = store.put(bytes([seed, i % 50]) * 10).media_id
            with contextlib.suppress(NotFound):
                assert media_id_of(store.get(media_id)) == media_id

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.used == 20 * len(store) <= 500
