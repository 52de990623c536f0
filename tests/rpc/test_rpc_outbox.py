from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.events import (
    Admitted,
    Delta,
    Draft,
    DraftPosition,
    Event,
    Failed,
    Finished,
    Snapshot,
    StageTimes,
    Usage,
)
from mmserve.errors import Cancelled
from mmserve.rpc.stream import DRAFTS, Outbox, coalesce

END = Finished("end", "done", Usage(1, 0, 1), 1, 1, StageTimes())


def shot(n: int, edited: int = 0) -> Snapshot:
    return Snapshot("▒", n, 100, n, edited)


def test_unsent_deltas_join_and_the_latest_snapshot_stays() -> None:
    unsent: list[Event] = []
    for event in (Admitted(0), Delta("a"), Delta("b"), shot(1), Delta("c"), shot(2), Delta("d"), Delta("e"), END):
        coalesce(unsent, event)
    assert unsent == [Admitted(0), Delta("abc"), shot(2), Delta("de"), END]


def of(sample: int, *events: Event) -> list[Event]:
    """The same events of another sample."""
    return [dataclasses.replace(e, sample=sample) for e in events]  # type: ignore[type-var]


def test_samples_join_by_themselves() -> None:
    unsent: list[Event] = []
    for event in (
        Admitted(0),
        *of(0, Delta("a")),
        *of(1, Delta("A")),
        *of(0, Delta("b"), shot(1, 2)),
        *of(1, Delta("B"), shot(2)),
        *of(0, shot(3, 4), Delta("c"), END),
        *of(1, Delta("C"), Delta("D"), END),
    ):
        coalesce(unsent, event)
    assert unsent == [
        Admitted(0),
        *of(0, Delta("ab")),
        *of(1, Delta("AB"), shot(2)),
        *of(0, shot(3, 6), Delta("c"), END),
        *of(1, Delta("CD"), END),
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ds-"), st.sampled_from("xyz")), max_size=80))
def test_any_interleaving_of_samples_gives_each_its_text_and_its_last_snapshot(script: list[tuple]) -> None:
    """``-`` stands for the client taking one event."""
    unsent: list[Event] = []
    sent: list[Event] = []
    texts, shots = ["", "", ""], [0, 0, 0]
    for number, (sample, kind, letter) in enumerate(script, 1):
        if kind == "d":
            texts[sample] += letter
            coalesce(unsent, Delta(letter, sample))
        elif kind == "s":
            shots[sample] = number
            coalesce(unsent, Snapshot("", number, 99, number, 0, sample))
        elif unsent:
            sent.append(unsent.pop(0))
        assert len(unsent) <= 3 * 3
    sent += unsent
    for sample in range(3):
        own = [e for e in sent if e.sample == sample]  # type: ignore[union-attr]
        assert "".join(e.text for e in own if isinstance(e, Delta)) == texts[sample]
        assert [e.committed for e in own if isinstance(e, Snapshot)][-1:] == [shots[sample]][: bool(shots[sample])]


def draft(number: int, sample: int) -> Draft:
    """A draft that changes one of five positions."""
    return Draft(((number % 5, number, f"{number}", "draft", 0.5, ()),), 5, number, sample)


def test_large_drafts_that_a_client_does_not_read_are_joined_to_one() -> None:
    """Eight of them, with twenty alternatives of thousands of positions, took a hundred megabytes for each sample."""
    alternatives = ((1, "a", 0.5),) * 20
    unsent: list[Event] = []
    for number in range(3):
        rows = tuple((index, number, "a", "draft", 0.5, alternatives) for index in range(1 << 9))
        coalesce(unsent, Draft(rows, 1 << 9, number))
    assert unsent == [Draft(rows, 1 << 9, 2)]
    coalesce(unsent, draft(3, sample=1))
    assert len(unsent) == 2


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("rrrd-")), max_size=120))
def test_however_slow_a_client_is_its_drafts_are_few_and_add_up_to_the_canvas(script: list[tuple]) -> None:
    """``r`` is a draft, ``d`` a delta, ``-`` the client taking one event."""
    unsent: list[Event] = []
    sent: list[Event] = []
    canvases: list[dict[int, DraftPosition]] = [{}, {}]
    text = ["", ""]
    for number, (sample, kind) in enumerate(script, 1):
        if kind == "r":
            made = draft(number, sample)
            canvases[sample] |= {at.index: at for at in made.positions}
            coalesce(unsent, made)
        elif kind == "d":
            text[sample] += "x"
            coalesce(unsent, Delta("x", sample))
        elif unsent:
            sent.append(unsent.pop(0))
        for one in range(2):
            assert sum(isinstance(e, Draft) and e.sample == one for e in unsent) <= DRAFTS
    for sample in range(2):
        own = [e for e in sent + unsent if e.sample == sample]  # type: ignore[union-attr]
        drafts = [e for e in own if isinstance(e, Draft)]
        assert {at.index: at for e in drafts for at in e.positions} == canvases[sample]
        assert [e.forwards for e in drafts] == sorted(e.forwards for e in drafts)
        assert "".join(e.text for e in own if isinstance(e, Delta)) == text[sample]


def test_the_last_sample_or_a_failure_ends_the_outbox(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        outbox = Outbox(3)
        events = [*of(1, Delta("a"), END), *of(0, END), *of(2, Delta("b"), END)]
        for event in events:
            outbox.put(event)
        outbox.put(Failed(Cancelled("late")))
        assert not outbox.ended
        assert [event async for event in outbox] == events and outbox.ended
        broken = Outbox(3)
        for event in (*of(1, END), Failed(Cancelled("x")), *of(0, END)):
            broken.put(event)
        assert [type(event) async for event in broken] == [Finished, Failed] and broken.ended

    asyncio.run(main())
    assert caplog.text.count("after the last one") == 2


letters = st.text(alphabet="abc▒é", max_size=3)
shots = st.builds(shot, st.integers(0, 99), st.integers(0, 3))
steps = st.lists(st.one_of(letters.map(Delta), shots, st.none()), max_size=60)


@given(steps)
def test_any_interleaving_gives_the_whole_text_and_the_last_snapshot(script: list[Event | None]) -> None:
    """``None`` stands for the client taking one event."""
    unsent: list[Event] = []
    sent: list[Event] = []
    for event in script:
        if event is not None:
            coalesce(unsent, event)
        elif unsent:
            sent.append(unsent.pop(0))
        assert len(unsent) <= 3
    sent += unsent
    put = [e for e in script if e is not None]
    assert "".join(e.text for e in sent if isinstance(e, Delta)) == "".join(e.text for e in put if isinstance(e, Delta))
    sent_shots, put_shots = ([e for e in events if isinstance(e, Snapshot)] for events in (sent, put))
    assert [e.committed for e in sent_shots][-1:] == [e.committed for e in put_shots][-1:]
    assert sum(e.edited for e in sent_shots) == sum(e.edited for e in put_shots), "no edit goes unannounced"


def test_from_another_thread() -> None:
    async def main() -> None:
        outbox = Outbox()

        def produce() -> None:
            outbox.put(Admitted(0))
            for i in range(5000):
                outbox.put(Delta(f"{i} "))
                outbox.put(shot(i))
                assert len(outbox) <= 4
            outbox.put(END)

        thread = threading.Thread(target=produce)
        thread.start()
        events = [event async for event in outbox]
        thread.join()
        assert events[0] == Admitted(0) and events[-1] == END and outbox.ended
        assert "".join(e.text for e in events if isinstance(e, Delta)) == "".join(f"{i} " for i in range(5000))
        assert [e for e in events if isinstance(e, Snapshot)][-1] == shot(4999)
        assert [event async for event in outbox] == []

    asyncio.run(main())


def test_events_of_the_loops_own_thread_do_not_wake_it() -> None:
    async def main() -> None:
        outbox = Outbox()
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", lambda *_: pytest.fail("a system call"))
            reader = asyncio.ensure_future(outbox.__anext__())
            await asyncio.sleep(0)
            outbox.put(Admitted(0))
            assert await reader == Admitted(0)

    asyncio.run(main())


def test_nothing_follows_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        outbox = Outbox()
        outbox.put(Failed(Cancelled("x")))
        outbox.put(END)
        assert [type(e) async for e in outbox] == [Failed]

    asyncio.run(main())
    assert "after the last one" in caplog.text


def test_events_after_the_loop_has_closed_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def make() -> Outbox:
        return Outbox()

    outbox = asyncio.run(make())
    engine = threading.Thread(target=outbox.put, args=(END,))
    with caplog.at_level(logging.DEBUG, "mmserve.rpc"):
        engine.start()
        engine.join()
    assert "after the end of the server" in caplog.text
