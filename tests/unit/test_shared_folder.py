"""A cache's folder that several processes use at once: one bound, whole files, and nobody else's files touched."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmserve.core.cached import Label
from mmserve.errors import ResourceExhausted
from mmserve.tiers.disk import DiskCache
from mmserve.tiers.memory import TensorCache

SIZE = 400  # bytes of a value
LABEL = Label("prefix", "m", "tenant", 16, "ab", "cd")
#: Writes values and reads others' for ever; prints a line once it has begun, and one for each wrong value.
WORK = """
import random, sys
from hashlib import sha256
from pathlib import Path
import torch
from mmserve.tiers.disk import DiskCache
def key(name): return sha256(str(name).encode()).digest()
def value(name): return {"x": torch.full((100,), float(name))}
tier, rng = DiskCache(Path(sys.argv[1]), int(sys.argv[2])), random.Random(int(sys.argv[3]))
for turn in range(int(sys.argv[4])):
    n = rng.randrange(40)
    found = tier.get(key(n))
    if found is not None and not torch.equal(found["x"], value(n)["x"]):
        print("wrong", n, flush=True)
    tier.put(key(n), value(n))
    if turn == 0:
        print("begun", flush=True)
"""


def key(name: object) -> bytes:
    return sha256(str(name).encode()).digest()


def value(name: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((SIZE // 4,), float(name))}


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}


def test_several_processes_share_one_bound(tmp_path: Path) -> None:
    """Two write for as long as it takes, one is killed in the middle, and the third looks."""
    one = DiskCache(tmp_path / "one", 1 << 20)
    one.put(key(0), value(0))
    folder, most = tmp_path / "shared", 8 * one.used
    command = [sys.executable, "-c", WORK, str(folder), str(most)]
    tier = DiskCache(folder, most)
    with (
        subprocess.Popen([*command, "1", "100000"], stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen([*command, "2", "120"], stdout=subprocess.PIPE, text=True) as ends,
    ):
        assert killed.stdout is not None and ends.stdout is not None
        assert killed.stdout.readline() == ends.stdout.readline() == "begun\n"
        for n in range(60):
            tier.put(key(n), value(n))
            assert tier.used <= most
        killed.kill()
        assert ends.stdout.read() == "" and ends.wait() == 0
    tier.put(key(99), value(99))  # nobody holds a lock that has gone
    assert tier.get(key(99)) is not None
    assert DiskCache(folder, most).used == sum(files(folder).values()) <= most
    assert not list(folder.glob("*.partial")), "what the one that was killed left is removed"


def test_what_one_process_writes_another_reads_and_drops(tmp_path: Path) -> None:
    """Two caches of one process are to each other as two processes: each has a look and a lock of its own."""
    one, other = (DiskCache(tmp_path, 1 << 20) for _ in range(2))
    one.put(key(1), value(1), LABEL)
    found = other.get(key(1))
    assert found is not None and torch.equal(found["x"], value(1)["x"]) and other.used == one.used > SIZE
    [entry] = other.entries()
    assert (entry.key, entry.label, entry.size, entry.pinned) == (key(1), LABEL, one.used, False)
    assert other.drop(key(1)) and not other.drop(key(1))
    assert key(1) not in one and one.get(key(1)) is None and one.used == 0


def test_what_is_read_elsewhere_is_not_the_first_to_go(tmp_path: Path) -> None:
    one = DiskCache(tmp_path, 1 << 20)
    one.put(key(0), value(0))
    size = one.used
    one, other = (DiskCache(tmp_path, 3 * size) for _ in range(2))
    one.put(key(1), value(1))
    one.put(key(2), value(2))
    assert other.get(key(0)) is not None
    one.put(key(3), value(3))
    assert key(0) in one and key(1) not in one


def test_pinned_files_stay_for_every_process_and_are_bounded(tmp_path: Path) -> None:
    one = DiskCache(tmp_path, 1 << 20)
    one.put(key(0), value(0))
    size = one.used
    one = DiskCache(tmp_path, 2 * size)
    assert one.pin(key(0), pinned=True) and not one.pin(key(9), pinned=True)
    other = DiskCache(tmp_path, 2 * size)
    for n in range(1, 5):
        other.put(key(n), value(n))
    assert key(0) in other and other.used == 2 * size
    assert other.pin(key(4), pinned=True)
    other.put(key(5), value(5))
    assert key(5) not in other, "there is no room for it"
    small = DiskCache(tmp_path, size)
    with pytest.raises(ResourceExhausted, match="disk_bytes"):
        small.pin(key(4), pinned=True)
    assert other.pin(key(0), pinned=False)
    other.put(key(5), value(5))
    assert key(5) in other and key(0) not in other


def test_nothing_goes_for_what_pinned_files_leave_no_room_for(tmp_path: Path) -> None:
    one = DiskCache(tmp_path, 1 << 20)
    one.put(key(0), value(0))
    size = one.used
    one = DiskCache(tmp_path, 3 * size)
    one.put(key(1), value(1))
    assert one.pin(key(0), pinned=True)
    large = {"x": torch.zeros(SIZE // 4 + 2 * size // 4)}
    one.put(key(2), large)
    assert key(1) in one and key(2) not in one
    less = DiskCache(tmp_path, size // 2)
    assert less.used == size and key(1) not in less, "a bound that was lowered leaves what is pinned"


def test_a_foreign_file_under_a_name_of_ours_is_neither_used_nor_touched(tmp_path: Path) -> None:
    tier = DiskCache(tmp_path, 1500)
    weights, target = tmp_path / f"{key(1).hex()}.safetensors", tmp_path / "weights"
    save_file({"x": torch.ones(1000)}, weights, metadata={"format": "pt"})
    save_file(value(2), target)
    (tmp_path / f"{key(2).hex()}.safetensors").symlink_to(target)
    (tmp_path / f"{key(3).hex()}.safetensors").write_bytes(b"")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for n in (1, 2, 3):
        assert tier.get(key(n)) is None
        tier.put(key(n), value(n))
        assert not tier.drop(key(n))
    for n in range(4, 12):
        tier.put(key(n), value(n))
    assert 0 < tier.used <= 1500 and DiskCache(tmp_path, 1500).used == tier.used
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_kinds_in_one_folder_know_nothing_of_each_other(tmp_path: Path) -> None:
    visual, pages = DiskCache(tmp_path, 1000), DiskCache(tmp_path, 1000, kind="kv")
    visual.put(key(1), value(1))
    pages.put(key(1), value(2))
    for n in range(5):
        pages.put(key(n), value(n))
    found = visual.get(key(1))
    assert found is not None and torch.equal(found["x"], value(1)["x"]) and 0 < pages.used <= 1000


def test_a_label_that_was_changed_makes_a_file_worthless(tmp_path: Path) -> None:
    tier = DiskCache(tmp_path, 1 << 20)
    tier.put(key(1), value(1), LABEL)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b"tenant", b"tenanT"))
    assert b"tenanT" in path.read_bytes()
    assert tier.get(key(1)) is None and not path.exists()


def test_memory_and_disk_are_listed_pinned_and_dropped_together(tmp_path: Path) -> None:
    cache = TensorCache(2 * SIZE, DiskCache(tmp_path, 1 << 20))
    for n in range(4):
        assert cache.put(key(n), value(n), Label("prefix", "m", "", 16, key(n).hex()))
    cache.flush()
    assert sorted((block.tier, key_) for key_, block in cache.blocks()) == sorted(
        [("host", key(2)), ("host", key(3)), *(("disk", key(n)) for n in range(4))]
    )
    assert cache.pin([key(3), key(0), key(9)], pinned=True) == 2
    for n in range(4, 8):
        cache.put(key(n), value(n), Label("prefix", "m", "", 16, key(n).hex()))
    pinned = {(block.tier, each) for each, block in cache.blocks() if block.pinned}
    assert pinned == {("host", key(3)), ("disk", key(3)), ("disk", key(0))}
    with pytest.raises(ResourceExhausted, match="memory"):
        TensorCache.pin(_full(), [key(n) for n in range(3)], pinned=True)
    assert cache.drop([key(3), key(0), key(9)]) == 2
    assert not {key(3), key(0)} & {each for each, _block in cache.blocks()}


def _full() -> TensorCache:
    """Three values in memory, whose bound is then lowered to two: as other pins would."""
    cache = TensorCache(3 * SIZE)
    for n in range(3):
        cache.put(key(n), value(n), LABEL)
    cache.capacity = 2 * SIZE
    return cache
