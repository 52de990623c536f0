"""The rules of a cluster without its workers: configuration, routing, when roles change, what is sent again."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import ask, picture
from hypothesis import given
from hypothesis import strategies as st

from mmserve.cluster.config import cluster_config, load_cluster
from mmserve.cluster.index import Index, beginning
from mmserve.cluster.messages import without_media
from mmserve.cluster.requests import Group, Part
from mmserve.cluster.routing import MAX_REQUESTS, Candidate, choose, max_requests, pixels, sharded, shards
from mmserve.cluster.switching import Demand, Switching
from mmserve.core.handover import ROLES, Handover
from mmserve.core.request import ImagePart, Message, Stage, VideoPart
from mmserve.core.share import MediaShare
from mmserve.core.tenant import Tenant
from mmserve.errors import ConfigError, DoesNotFit, Internal, InvalidArgument, MMServeError, ResourceExhausted

E, P, D = (frozenset({role}) for role in ROLES)


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[cluster]\nsave_every = 4\n[[workers]]\nroles = "e"\ncount = 2\n[[workers]]\nroles = "pd"\n')
    found = load_cluster(file)
    assert found.cluster.save_every == 4
    assert [worker.stages for worker in found.each] == [E, E, P | D]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, "there must be workers"),
        ({"workers": []}, "there must be workers"),
        ({"workers": [{"roles": "e"}, {"roles": "d"}]}, "no worker has the role 'prefill'"),
        ({"workers": [{"roles": "x"}]}, "letters e, p and d"),
        ({"workers": [{"roles": ""}]}, "letters e, p and d"),
        ({"workers": [{"role": "epd"}]}, "no key 'role'"),
        ({"workers": [{"count": 0}]}, "count must be at least 1"),
        ({"workers": [{}], "cluster": {"placement": "NEAR"}}, "placement must be one of"),
        ({"workers": [{}], "cluster": {"silent_seconds": 0.0}}, "silent_seconds must be above 0"),
        ({"workers": [{}], "clusters": {}}, "unknown table 'clusters'"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(data: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cluster_config(data)


def test_the_least_loaded_worker_is_chosen_unless_another_saves_more() -> None:
    assert choose([]) is None
    assert choose([Candidate("a", 3.0), Candidate("b", 2.0)]) == "b"
    assert choose([Candidate("a", 3.0, saved=1.0), Candidate("b", 2.5)]) == "a"
    assert choose([Candidate("a", 9.0, saved=1.0), Candidate("b", 2.0)]) == "b"
    assert choose([Candidate("a", 3.0, saved=1.0), Candidate("b", 3.0, saved=2.0)]) == "b"


def test_a_worker_keeps_what_it_can_go_on_with() -> None:
    assert max_requests(E, "encode", 16) == MAX_REQUESTS["encode"]
    assert max_requests(E | P | D, "encode", 16) == MAX_REQUESTS["encode"] + MAX_REQUESTS["prefill"] + 16
    assert max_requests(E | D, "encode", 16) == MAX_REQUESTS["encode"], "prefill is elsewhere"
    assert max_requests(D, "decode", 16) == 16
    assert max_requests(P, "decode", 16) == 0


def test_only_the_latest_things_are_remembered() -> None:
    index = Index(most=2)
    index.record("ab", "one")
    index.record("bc", "two")
    assert index.share("a", "one") == 0.0
    assert index.share("b", "one") == index.share("bc", "two") == 1.0
    assert index.share("xc", "two") == 0.5
    index.dropped("c")
    assert index.share("bc", "two") == 0.5
    index.worker_exited("two")
    assert index.share("bc", "two") == 0.0 and index.share("b", "one") == 1.0


def test_of_a_prompt_only_what_is_there_without_a_gap_counts() -> None:
    index = Index()
    index.record(("a", "b", "d"), "one")
    assert index.leading(("a", "b", "c", "d"), "one") == 0.5
    assert index.leading((), "one") == index.leading(("c", "a"), "one") == 0.0


def test_prompts_are_compared_from_their_beginning() -> None:
    def named(text: str, **changes: object) -> tuple[object, ...]:
        return beginning(replace(ask("a", text), **changes))

    long = "be kind and exact. " * 40
    one, other = named(long + "What is red?"), named(long + "What is blue?")
    shared = [a == b for a, b in zip(one, other, strict=True)]
    assert sum(shared) == len(long + "What is ") // 256 + 1 and shared == sorted(shared, reverse=True)
    assert not set(one) & set(named(long, tenant=Tenant(name="x", cache="x")))
    assert not set(one) & set(named(long, adapter="red:1"))


def demand(**requests: int) -> dict[str, Demand]:
    return {role: Demand(requests.get(role, 0), 0.5) for role in ROLES}


ONE_ONE_FOUR = {"e": (E, 3), "p": (P, 0), **{f"d{i}": (D, i) for i in range(4)}}


def test_the_idlest_worker_of_a_stage_with_little_to_do_helps_the_one_with_most() -> None:
    switching = Switching(every=5.0)
    busy = demand(encode=40)
    assert switching.due_change(0.0, busy, ONE_ONE_FOUR) is None, "once is chance"
    change = switching.due_change(1.0, busy, ONE_ONE_FOUR)
    assert change is not None and (change.name, change.taken_from, change.given_to) == ("d0", "decode", "encode")
    assert switching.due_change(2.0, busy, ONE_ONE_FOUR) is None, "the next one takes as long again"
    assert switching.due_change(3.0, busy, ONE_ONE_FOUR) is None
    assert switching.due_change(6.0, busy, ONE_ONE_FOUR) is not None


@given(
    st.fixed_dictionaries({role: st.builds(Demand, st.integers(0, 100), st.floats(0, 5)) for role in ROLES}),
    st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=2),
        st.tuples(st.frozensets(st.sampled_from(ROLES), min_size=1), st.integers(0, 50)),
        max_size=8,
    ),
)
def test_every_stage_keeps_a_worker_and_the_change_helps(
    demand: dict[str, Demand], workers: dict[str, tuple[frozenset[str], int]]
) -> None:
    switching = Switching(every=0.0)
    switching.due_change(0.0, demand, workers)
    change = switching.due_change(1.0, demand, workers)
    if change is None:
        return
    assert workers[change.name][0] == {change.taken_from}
    after = {name: roles for name, (roles, _busy) in workers.items()} | {change.name: frozenset({change.given_to})}
    able = {role: sum(role in roles for roles in after.values()) for role in ROLES}
    assert all(able.values())
    before = demand[change.given_to].total / (able[change.given_to] - 1)
    assert before > demand[change.taken_from].total / able[change.taken_from]
    assert demand[change.given_to].requests >= able[change.given_to]


@given(st.text("ab", max_size=40), st.data())
def test_text_that_comes_again_is_sent_once(text: str, data: st.DataObject) -> None:
    """Whatever state a request goes on from, and wherever its text is cut."""
    group = Group(ask("one"), lambda _event: None, 0.0)
    part = Part(group, None, Handover(group.request, Stage.QUEUED, None))
    got, saved = "", 0
    for _ in range(4):
        part.point = Handover(group.request, Stage.READY, None, sent=saved)
        part.order("model", "worker", lambda parcel: parcel)
        end = data.draw(st.integers(len(got), len(text)))
        cuts = sorted({saved, *data.draw(st.lists(st.integers(saved, end), max_size=4)), end})
        for begin, until in pairwise(cuts):
            got += part.new_text(0, text[begin:until])
        assert got == text[: len(got)] and len(got) == max(end, len(got))
        saved = data.draw(st.integers(0, len(got)))


def test_text_that_comes_again_is_known_when_samples_part() -> None:
    group = Group(ask("two", n=2), lambda _event: None, 0.0, sent={0: 3, 1: 1})
    part = Part(group, None, Handover(group.request, Stage.QUEUED, None))
    part.order("model", "worker", lambda parcel: parcel)
    assert part.new_text(0, "ab") == ""
    group.split(part)
    assert [group.parts[i].new_text(i, "cde"[i:]) for i in (0, 1)] == ["de", "e"]


def test_samples_that_have_ended_do_not_begin_again() -> None:
    group = Group(ask("many", n=3), lambda _event: None, 0.0, done={1})
    part = Part(group, None, Handover(group.request, Stage.QUEUED, None), worker="w")
    group.split(part)
    assert sorted(group.parts) == [0, 2]
    assert [each.worker for each in group.parts.values()] == ["w", "w"]
    assert [each.point.request.sampling.n for each in group.parts.values()] == [1, 1]


def test_files_of_media_do_not_travel_further_than_encode() -> None:
    request = ask("a", images=(picture(1),))
    slim = without_media(request)
    assert [type(part) for part in slim.messages[0].parts] == [type(part) for part in request.messages[0].parts]
    assert all(part.data == b"" for part in slim.messages[0].parts if isinstance(part, ImagePart))
    text = ask("b")
    assert without_media(text) is text


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument.of("a.b", "must be c"),
        DoesNotFit.of("a", "too long"),
        ResourceExhausted("full", retry_after=2.5),
        Internal("a bug", error_id="x1"),
    ],
)
def test_errors_travel_as_they_are(error: MMServeError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))


# --- media that several workers encode ---


def test_shares_are_of_like_cost_and_each_place_is_in_one() -> None:
    assert shards([5.0, 4.0, 3.0, 3.0, 3.0], 2) == [(0, 3), (1, 2, 4)]
    assert shards([1.0], 3) == [(0,)] and shards([], 3) == []
    rng = random.Random(0)
    for _ in range(50):
        costs = [rng.uniform(1, 10) for _ in range(rng.randint(1, 12))]
        most = rng.randint(1, 5)
        made = shards(costs, most)
        assert sorted(i for part in made for i in part) == list(range(len(costs)))
        sums = [sum(costs[i] for i in part) for part in made]
        assert all(made) and max(sums) - min(sums) <= max(costs)


def test_an_image_counts_by_its_pixels_and_anything_else_by_its_bytes() -> None:
    assert pixels(ImagePart(picture(1, (30, 20)))) == 600
    assert pixels(ImagePart(b"no image")) == pixels(VideoPart(b"no image")) > 0
    assert pixels(ImagePart(b"")) == 0


def test_a_request_is_shared_out_with_the_files_of_each_share_alone() -> None:
    files = [picture(i, (10, 10)) for i in range(3)]
    whole = ask("r", "What?", images=tuple(files))
    made = sharded(whole, 2, 300)
    assert [chosen for chosen, _request in made] == [(MediaShare(0), MediaShare(2)), (MediaShare(1),)]
    for chosen, request in made:
        kept = [part.data for m in request.messages for part in m.parts if isinstance(part, ImagePart)]
        assert kept == [data if MediaShare(i) in chosen else b"" for i, data in enumerate(files)]
    assert not sharded(whole, 2, 301) and not sharded(whole, 1, 1) and not sharded(whole, 2, 0)
    assert not sharded(ask("r", "What?", images=(files[0],)), 2, 1)


def test_a_video_is_cut_into_as_many_parts_as_it_costs_shares() -> None:
    small, large = VideoPart(b"s" * 1000), VideoPart(b"l" * 9000)
    alone = replace(ask("r"), messages=(Message("user", (large,)),))
    assert [chosen for chosen, _request in sharded(alone, 3, 1)] == [(MediaShare(0, i, 3),) for i in range(3)]
    assert all(request == alone for _chosen, request in sharded(alone, 3, 1))
    both = replace(ask("r"), messages=(Message("user", (small, large)),))
    made = [chosen for chosen, _request in sharded(both, 2, 1)]
    assert made == [(MediaShare(0), MediaShare(1, 0, 2)), (MediaShare(1, 1, 2),)]
    for chosen, request in sharded(both, 2, 1):
        assert [bool(part.data) for part in request.messages[0].parts] == [MediaShare(0) in chosen, True]  # type: ignore[union-attr]
