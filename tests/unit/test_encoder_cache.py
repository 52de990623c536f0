"""The encoder cache by itself: bounds, references, one making a key, what does not fit, and the tier on disk."""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENCE, eventually

from mmserve.config import EncoderCacheConfig
from mmserve.core.cached import Label
from mmserve.errors import ConfigError
from mmserve.tiers import disk
from mmserve.tiers.caches import Caches
from mmserve.tiers.disk import DiskCache
from mmserve.tiers.keys import digest, settings_digest, weights_digest
from mmserve.tiers.memory import Entry, TensorCache
from mmserve.tiers.writer import Writer

SIZE = 400  # bytes of a value


def key(name: object) -> bytes:
    return sha256(str(name).encode()).digest()


def value(name: object) -> Entry:
    return {"x": torch.full((SIZE // 4,), float(hash(name) % 1000))}


def anything(_i: int, _entry: Entry) -> bool:
    return True


class Maker:
    """Makes values and remembers which; ``get`` leases them and says what they were."""

    def __init__(self, cache: TensorCache) -> None:
        self.cache, self.made = cache, Counter[object]()

    def get(self, *names: object, inside: Callable[[], None] = lambda: None) -> list[float]:
        def make(chosen: list[int]) -> Sequence[Entry]:
            self.made.update(names[i] for i in chosen)
            return [value(names[i]) for i in chosen]

        with self.cache.lease([key(n) for n in names], make, anything) as entries:
            inside()
            assert all(torch.equal(e["x"], value(n)["x"]) for e, n in zip(entries, names, strict=True))
            return [float(e["x"][0]) for e in entries]


def test_what_is_there_is_not_made_again() -> None:
    maker = Maker(TensorCache(10 * SIZE))
    maker.get(1, 2)
    maker.get(2, 3, 3)
    stats = maker.cache.stats()
    assert maker.made == {1: 1, 2: 1, 3: 1}
    assert (stats.lookups, stats.hits, stats.made, stats.entries, stats.used_bytes) == (5, 2, 3, 3, 3 * SIZE)


def test_the_least_recently_used_goes_first() -> None:
    maker = Maker(TensorCache(3 * SIZE))
    for name in (1, 2, 3, 1, 4, 1, 2):
        maker.get(name)
    assert maker.made == {1: 1, 2: 2, 3: 1, 4: 1}
    assert maker.cache.stats().evicted == 2 and maker.cache.stats().used_bytes == 3 * SIZE


def test_what_is_referenced_stays_and_the_bound_holds() -> None:
    maker = Maker(TensorCache(2 * SIZE))

    def inside() -> None:
        maker.get(3, 4)  # no room: used, not kept
        assert maker.cache.stats().used_bytes == 2 * SIZE
        maker.get(1, 2)
        assert maker.made == {1: 1, 2: 1, 3: 1, 4: 1}

    maker.get(1, 2, inside=inside)
    maker.get(3)
    assert maker.made[3] == 2 and maker.cache.stats().evicted == 1


def test_what_alone_is_too_large_is_not_kept_and_drives_nothing_out() -> None:
    maker = Maker(TensorCache(SIZE))
    maker.get(1)
    with maker.cache.lease([key("big")], lambda _c: [{"x": torch.zeros(SIZE)}], anything):
        pass
    maker.get(1)
    assert maker.made == {1: 1}
    Maker(TensorCache(0)).get(1)


def test_many_threads_make_each_value_once() -> None:
    maker, gate = Maker(TensorCache(100 * SIZE)), threading.Event()
    entered = threading.Barrier(9)

    def slow(_chosen: list[int]) -> Sequence[Entry]:
        maker.made["slow"] += 1
        assert gate.wait(30)
        return [value("slow")]

    def get() -> float:
        entered.wait(30)
        with maker.cache.lease([key("slow")], slow, anything) as [entry]:
            return float(entry["x"][0])

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(get) for _ in range(8)]
        entered.wait(30)
        eventually(lambda: maker.cache.stats().lookups == 8, "all of them look")
        gate.set()
        assert len({f.result(30) for f in waiting}) == 1
    stats = maker.cache.stats()
    assert maker.made == {"slow": 1} and stats.made == 1 and stats.joined + stats.hits == 7


def test_who_waited_for_a_value_holds_it_too() -> None:
    """It is not driven out while they use it, though who made it has gone."""
    cache, gate, made = TensorCache(SIZE), threading.Event(), threading.Event()

    def slow(_chosen: list[int]) -> Sequence[Entry]:
        assert gate.wait(30)
        return [value(1)]

    def first() -> None:
        with cache.lease([key(1)], slow, anything):
            pass
        made.set()

    def second() -> int:
        with cache.lease([key(1)], lambda _c: [value(1)], anything):
            assert made.wait(30)
            Maker(cache).get(2)
            return cache.stats().evicted

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        eventually(lambda: cache.stats().lookups == 1, "the first is under way")
        other = pool.submit(second)
        eventually(lambda: cache.stats().lookups == 2, "the second waits")
        gate.set()
        one.result(30)
        assert other.result(30) == 0
    Maker(cache).get(2)
    assert cache.stats().evicted == 1


def test_what_somebody_else_makes_is_used_only_if_it_fits() -> None:
    cache, gate = TensorCache(10 * SIZE), threading.Event()

    def slow(_chosen: list[int]) -> Sequence[Entry]:
        assert gate.wait(30)
        return [{"y": torch.zeros(3)}]

    def first() -> None:
        with cache.lease([key(1)], slow, anything):
            pass

    def second() -> set[str]:
        with cache.lease([key(1)], lambda _c: [value(1)], lambda _i, entry: "x" in entry) as [entry]:
            return set(entry)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        eventually(lambda: cache.stats().lookups == 1, "the first is under way")
        other = pool.submit(second)
        eventually(lambda: cache.stats().lookups == 2, "the second waits")
        gate.set()
        one.result(30)
        assert other.result(30) == {"x"}


def test_two_that_want_each_others_values_do_not_wait_for_each_other() -> None:
    maker = Maker(TensorCache(100 * SIZE))
    rng = random.Random(0)
    orders = [rng.sample(range(20), 20) for _ in range(32)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda names: maker.get(*names), orders, timeout=60))
    assert maker.made == dict.fromkeys(range(20), 1)


def test_one_that_fails_harms_nobody_else() -> None:
    cache, gate = TensorCache(10 * SIZE), threading.Event()

    def fail(_chosen: list[int]) -> Sequence[Entry]:
        assert gate.wait(30)
        raise ValueError("mine alone")

    def failing() -> None:
        with cache.lease([key(1), key(2)], fail, anything):
            raise AssertionError("never reached")

    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(failing)
        eventually(lambda: cache.stats().lookups == 2, "the first is under way")
        good = pool.submit(Maker(cache).get, 2, 1)
        eventually(lambda: cache.stats().lookups == 4, "the second waits")
        gate.set()
        with pytest.raises(ValueError, match="mine alone"):
            bad.result(30)
        assert good.result(30) == [float(value(n)["x"][0]) for n in (2, 1)]
    Maker(cache).get(1, 2)
    assert cache.stats().hits == 2


def test_a_value_that_does_not_fit_is_made_anew() -> None:
    cache, maker = TensorCache(10 * SIZE), Maker(TensorCache(10 * SIZE))
    with cache.lease([key(1)], lambda _c: [{"y": torch.zeros(3)}], anything):
        pass
    with cache.lease([key(1)], lambda _c: [value(1)], lambda _i, entry: "x" in entry) as [entry]:
        assert torch.equal(entry["x"], value(1)["x"])
    assert cache.stats().unfit == 1 and cache.stats().used_bytes == SIZE
    with cache.lease([key(1)], lambda _c: [], anything) as [entry]:
        assert set(entry) == {"x"}
    assert not maker.made


def test_references_are_given_back_however_a_lease_ends() -> None:
    maker = Maker(TensorCache(SIZE))

    def inside() -> None:
        raise RuntimeError("the reader's own")

    with pytest.raises(RuntimeError, match="the reader's own"):
        maker.get(1, inside=inside)
    maker.get(2)
    assert maker.cache.stats().evicted == 1


@pytest.mark.parametrize("room", [2, 7, 40])
def test_bytes_never_pass_the_bound(room: int) -> None:
    """Threads that ask for whatever they like, a few values at a time; somebody always looks at the bytes."""
    maker, ended = Maker(TensorCache(room * SIZE)), threading.Event()
    most = [0]

    def watch() -> None:
        while not ended.is_set():
            most[0] = max(most[0], maker.cache.stats().used_bytes)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            maker.get(*rng.sample(range(30), rng.randint(1, 4)))
            most[0] = max(most[0], maker.cache.stats().used_bytes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    ended.set()
    watcher.join()
    assert SIZE <= most[0] <= room * SIZE
    stats = maker.cache.stats()
    assert stats.made == sum(maker.made.values()) and stats.lookups == stats.hits + stats.joined + stats.made
    assert room < 30 or maker.made == dict.fromkeys(range(30), 1)


# --- disk ---


def stored(folder: Path, capacity: int = 1 << 20) -> Maker:
    return Maker(TensorCache(10 * SIZE, DiskCache(folder, capacity)))


def test_the_disk_survives_a_restart(tmp_path: Path) -> None:
    stored(tmp_path).get(1, 2)
    again = stored(tmp_path)
    again.get(2, 1, 3)
    stats = again.cache.stats()
    assert again.made == {3: 1} and (stats.disk_hits, stats.made) == (2, 1) and stats.disk_bytes > 3 * SIZE
    again.get(1)
    assert again.cache.stats().hits == 1


def test_the_disk_is_bounded_and_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    one = stored(tmp_path / "one")
    one.get(0)
    size = one.cache.stats().disk_bytes
    folder = tmp_path / "many"
    maker = Maker(TensorCache(0, DiskCache(folder, 3 * size)))
    for name in (1, 2, 3, 1, 4):
        maker.get(name)
        assert sum(p.stat().st_size for p in folder.iterdir()) == maker.cache.stats().disk_bytes <= 3 * size
    assert maker.made == {1: 1, 2: 1, 3: 1, 4: 1}
    maker.get(2)
    assert maker.made[2] == 2
    Maker(TensorCache(0, DiskCache(folder, size)))
    assert [p.name for p in folder.iterdir()] == [f"{key(2).hex()}.safetensors"], "a smaller bound holds at once"


def test_files_that_were_cut_changed_or_renamed_are_not_used(tmp_path: Path) -> None:
    stored(tmp_path).get(1, 2, 3, 4)
    paths = {n: tmp_path / f"{key(n).hex()}.safetensors" for n in (1, 2, 3, 4)}
    paths[1].write_bytes(paths[1].read_bytes()[:-8])
    changed = bytearray(paths[2].read_bytes())
    changed[-3] ^= 1
    paths[2].write_bytes(changed)
    paths[3].write_bytes(paths[4].read_bytes())  # a true file, of another key
    left = tmp_path / f"{key(5).hex()}.partial"
    left.write_bytes(b"half")
    again = stored(tmp_path)
    assert not left.exists()
    again.get(1, 2, 3, 4)
    assert again.made == {1: 1, 2: 1, 3: 1}
    last = stored(tmp_path)
    last.get(1, 2, 3, 4)
    assert not last.made, "what was made anew is on disk again"


def test_what_others_keep_in_the_folder_is_neither_counted_nor_touched(tmp_path: Path) -> None:
    """A folder that was named by mistake loses nothing, however little the cache may hold."""
    names = ("model-00001-of-00002.safetensors", "download.partial", f"{key(9).hex()}.json", f"{'G' * 64}.safetensors")
    for name in names:
        (tmp_path / name).write_bytes(bytes(9000))
    (tmp_path / f"{key(8).hex()}.safetensors").mkdir()
    tier = DiskCache(tmp_path, 8000)
    assert tier.used == 0
    for n in range(4):
        tier.put(key(n), {"x": torch.full((1000,), float(n))})
    assert 4000 < tier.used <= 8000 and all((tmp_path / name).stat().st_size == 9000 for name in names)
    assert tier.get(key(9)) is None and (tmp_path / f"{key(8).hex()}.safetensors").is_dir()


def test_a_file_that_changes_once_it_is_read_changes_nothing_in_memory(tmp_path: Path) -> None:
    """Of a mapped file the tensors would, and what is cut off would end the process."""
    tier, ones = DiskCache(tmp_path, 1 << 20), torch.ones(50_000)
    tier.put(key(1), {"x": ones})
    found = tier.get(key(1))
    [path] = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.seek(-400, 2)
        file.write(bytes(400))
    assert found is not None and torch.equal(found["x"], ones)
    path.write_bytes(b"")
    assert torch.equal(found["x"], ones) and tier.get(key(1)) is None


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"__metadata__":[]}',
        b'{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}',
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,400]}}',
    ],
)
def test_whatever_stands_in_a_file_fails_no_request(tmp_path: Path, header: bytes) -> None:
    stored(tmp_path).get(1)
    [path] = tmp_path.iterdir()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
    again = stored(tmp_path)
    again.get(1)
    assert again.made == {1: 1}


def test_a_file_that_may_not_be_touched_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError("another user's")

    stored(tmp_path).get(1)
    monkeypatch.setattr(disk.os, "utime", refuse)
    again = stored(tmp_path)
    again.get(1)
    assert not again.made and list(tmp_path.iterdir())


@pytest.mark.parametrize("failure", [OSError("no space left"), RuntimeError("some tensors share memory")])
def test_a_file_that_cannot_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def half(_tensors: object, path: Path, **_named: object) -> None:
        path.write_bytes(b"half")
        raise failure

    monkeypatch.setattr(disk, "save_file", half)
    maker = stored(tmp_path)
    maker.get(1)
    assert not list(tmp_path.iterdir()) and maker.cache.stats().disk_bytes == 0


def test_types_and_empty_tensors_come_back(tmp_path: Path) -> None:
    entry = {"a": torch.randn(3, 2).bfloat16(), "b": torch.empty(0, dtype=torch.int64), "c": torch.randn(4, 6)[:, ::2]}
    with torch.inference_mode():
        DiskCache(tmp_path, 1 << 20).put(key(1), {name: t.clone() if name == "a" else t for name, t in entry.items()})
    found = DiskCache(tmp_path, 1 << 20).get(key(1))
    assert found is not None and set(found) == set(entry)
    assert all(torch.equal(found[n], entry[n]) and found[n].dtype == entry[n].dtype for n in entry)


def test_a_disk_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"disk_folder .*file cannot be used"):
        Caches.of(EncoderCacheConfig(disk_folder=str(tmp_path / "file")))
    folder = tmp_path / "gone"
    maker = stored(folder)
    folder.rmdir()
    maker.get(1, 2, 3)
    assert caplog.text.count("cannot write") == 1 and maker.made == {1: 1, 2: 1, 3: 1}
    folder.mkdir()
    maker.get(4, 5)
    assert caplog.text.count("can write to") == 1 and len(list(folder.iterdir())) == 2
    folder.rename(tmp_path / "away")
    maker.get(6)
    assert caplog.text.count("cannot write") == 2


def test_an_entry_that_cannot_be_looked_for_on_disk_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(_disk: DiskCache, _key: bytes) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    tier = DiskCache(tmp_path, 1 << 20)
    writer = Writer(tier)
    with monkeypatch.context() as patched:
        patched.setattr(DiskCache, "__contains__", stale)
        assert writer.put(key(1), value(1), None)
        flushing = threading.Thread(target=writer.flush, daemon=True)
        flushing.start()
        flushing.join(30)
    assert not flushing.is_alive() and caplog.text.count("could not be written to disk") == 1
    assert writer.put(key(2), value(2), None)
    writer.flush()
    assert key(2) in tier


def test_flush_waits_only_for_what_was_queued_before(tmp_path: Path) -> None:
    """Under load, something is always queued."""
    flushed, waited = threading.Event(), list[bool]()

    class Busy(DiskCache):
        def put(self, key: bytes, entry: Any, label: Label | None = None) -> None:
            if waited or key == late:
                waited.append(flushed.wait(PATIENCE))
            super().put(key, entry, label)
            writer.put(late, value(2), None)

    late, writer = key(2), Writer(Busy(tmp_path, 1 << 20))
    writer.put(key(1), value(1), None)
    writer.flush()
    flushed.set()
    writer.flush()
    assert waited == [True]


def test_statistics_are_read_without_the_lock_of_lookups(tmp_path: Path) -> None:
    """To find the size of the folder, it may have to be scanned, or another process waited for."""
    seen: list[bool] = []

    class Watched(DiskCache):
        @property
        def used(self) -> int:
            seen.append(cache._lock.locked())
            return super().used

    cache = TensorCache(1 << 20, Watched(tmp_path, 1 << 20))
    cache.stats()
    assert seen == [False]


# --- keys ---


def test_parts_of_a_key_do_not_run_together() -> None:
    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc"), digest(b"abc", b"")}) == 4
    assert len(digest(b"x")) == 32


def test_digests_of_settings_and_weights() -> None:
    assert settings_digest({"a": 1, "b": {"c": 2}}) == settings_digest({"b": {"c": 2}, "a": 1})
    assert settings_digest({"a": 1}) != settings_digest({"a": 1.5})
    made = torch.nn.Linear(3, 3)
    before = weights_digest(made)
    assert before == weights_digest(made)
    with torch.no_grad():
        made.weight[2, 2] = torch.nextafter(made.weight[2, 2], torch.tensor(9.0))
    assert weights_digest(made) != before
    assert weights_digest(made) != weights_digest(made.bfloat16())


def test_what_is_dropped_while_it_is_used_is_forgotten_after_that() -> None:
    cache = TensorCache(10 * SIZE)
    maker = Maker(cache)

    def drop() -> None:
        assert cache.drop([key(1)]) == 1
        assert cache.drop([key(1)]) == cache.pin([key(1)], True) == 0 and cache.peek(key(1)) is None
        maker.get(1)  # made anew, for it is forgotten

    maker.get(1, inside=drop)
    assert maker.made[1] == 2 and cache.stats().used_bytes == 0
    maker.get(1)
    maker.get(1)
    assert maker.made[1] == 3 and cache.stats().used_bytes == SIZE
