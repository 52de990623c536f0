"""Windows of streams: what is drawn is the same each time, and every answer is what the drawn frames show."""

import random
import re

import helpers
import pytest

from mmserve.reference.auxiliary import APPEARED, IGNORED, SAME, name_of
from mmserve.reference.clips import Actor, Clip
from mmserve.reference.data import collate, draw
from mmserve.reference.images import WATCH
from mmserve.reference.model import FRAME_TOKENS, VISUAL_TOKENS
from mmserve.reference.scenes import COLORS, KINDS, Shape
from mmserve.reference.stream_accuracy import held_out_clips
from mmserve.reference.streams import (
    LABEL_CYCLE,
    MAX_POSITIONS,
    WHOLE,
    Window,
    about_clip,
    ask,
    cut,
    draw_rows,
    draw_window,
    frame_times,
    training_clips,
)
from mmserve.reference.tokenizer import EOT, IMAGE, VIDEO, token_id

CLIPS = held_out_clips(60)
NAME = re.compile(rf"({'|'.join(COLORS)}) ({'|'.join(KINDS)})")


@pytest.fixture(scope="module")
def tokenizer():
    return helpers.tokenizer()


def windows(count: int, whole: int = 20, carriers: int = 0) -> list[Window]:
    rng = random.Random(7)
    return [draw_window(rng, whole, carriers, CLIPS) for _ in range(count)]


def names(window: Window, index: int) -> set[str]:
    """The names of the shapes that a whole frame of a window shows, as its picture is drawn."""
    clip, frame = window.whole[index]
    shown = window.clips[clip].held(frame_times(window.clips[clip])[frame])
    return {f"{color} {kind}" for kind, color in shown.values()}


def test_the_same_seed_draws_the_same_windows_and_questions():
    for carriers in (False, True):
        first, again, other = (draw_rows(random.Random(seed), 0.3, 6, CLIPS, carriers=carriers) for seed in (3, 3, 4))
        assert first == again != other
        layouts = {(len(window.whole), window.carriers) for window, _questions in first}
        assert len(layouts) == 1
        assert carriers or layouts.pop()[1] == 0


def test_windows_are_consecutive_frames_that_end_anywhere_in_a_clip():
    ends = set()
    for window in windows(300, whole=5, carriers=9):
        assert len(window.frames) == 14 and len(window.whole) == 5
        for (clip, frame), (next_clip, next_frame) in zip(window.frames, window.frames[1:], strict=False):
            follows = (clip, frame + 1) if frame + 1 < window.clips[clip].seconds else (clip + 1, 0)
            assert (next_clip, next_frame) == follows
        clip, frame = window.frames[-1]
        assert clip == len(window.clips) - 1 and window.frames[0][0] == 0
        ends.add(window.clips[clip].seconds - 1 - frame)
        assert window.label(4) == window.second % LABEL_CYCLE and window.second >= 13
    assert ends == set(range(8))
    assert {window.label(0) for window in windows(300)} == set(range(LABEL_CYCLE))


def test_what_is_cut_off_a_clip_is_not_told_of():
    red, blue = Shape("circle", "red", "small", 0, 0), Shape("square", "blue", "large", 1, 1)
    clip = Clip("changes", (Actor(red, appears=2, leaves=6), Actor(blue, turns=(4, "white"))), 8, 0)
    assert cut(clip, 0, 7) == clip
    early = cut(clip, 0, 3)
    assert early.actors == (Actor(red, appears=2), Actor(blue)) and early.seconds == 4
    late = cut(clip, 4, 7)
    assert late.actors == (Actor(red, leaves=2), Actor(Shape("square", "white", "large", 1, 1)))
    assert cut(clip, 6, 7).actors == (Actor(Shape("square", "white", "large", 1, 1)),)
    assert cut(clip, 0, 1).actors == (Actor(blue),)


def spans(window: Window, indices: range) -> dict[str, tuple[int, int]]:
    """The first and last (inclusive) of these frames that show each name."""
    found: dict[str, tuple[int, int]] = {}
    for index in indices:
        for name in names(window, index):
            found[name] = (found.get(name, (index, index))[0], index)
    return found


def check(window: Window, question: str, answer: str, indices: range) -> str:
    """Check one answer about the frames ``indices`` against what each of them shows; the kind that was checked."""
    seen = spans(window, indices)
    turned = any(actor.turns for actor in window.clips[window.whole[indices[0]][0]].actors)
    asked = [f"{color} {kind}" for color, kind in NAME.findall(question)]
    if "how many shapes appear" in question.lower() and not turned:
        assert answer == str(sum(first > indices[0] for first, _last in seen.values()))
        return "events"
    if "which appears first" in question.lower():
        assert answer == f"the {min(asked, key=lambda name: seen[name][0])}"
        return "order"
    if "for how long" in question.lower():
        first, last = seen[asked[0]]
        assert answer == f"for {last - first + 1} s"
        return "duration"
    if "when does" in question.lower():
        first, last = seen[asked[0]]
        moment = first if " appear" in question else last + 1
        assert answer == f"at {window.label(moment)} s"
        return "when"
    return ""


def test_answers_about_clips_are_what_their_frames_show():
    checked: dict[str, int] = {}
    for window in windows(400):
        rng = random.Random(1)
        for question in ask(window, rng):
            newest = len(window.clips) - 1
            indices = window.indices_of(newest)
            if question.task in ("now", "narration"):
                continue
            if question.task == "lately":
                seconds = int(question.text.split()[3])
                assert 2 <= seconds <= len(indices)
                indices = range(len(window.whole) - seconds, len(window.whole))
            if question.task == "earlier":
                asked = {f"{color} {kind}" for color, kind in NAME.findall(question.text)}
                having = [
                    clip
                    for clip in range(len(window.clips))
                    if asked & set().union(*(names(window, i) for i in window.indices_of(clip)))
                ]
                assert len(having) == 1 and having[0] < newest
                indices = window.indices_of(having[0])
                assert len(indices) == window.clips[having[0]].seconds
                if question.text.startswith("In the last"):
                    assert int(question.text.split()[3]) >= len(window.whole) - indices[0]
                else:
                    assert question.text.startswith("Earlier, ")
            kind = check(window, question.text, question.answer, indices)
            checked[f"{question.task} {kind}".strip()] = checked.get(f"{question.task} {kind}".strip(), 0) + 1
    for kind in ("events", "order", "duration", "when"):
        assert checked[f"{kind} {kind}"] > 50 and checked[f"lately {kind}"] > 20, checked
    assert checked["earlier order"] > 20 and checked["earlier when"] > 20, checked


def test_answers_about_now_are_what_the_newest_frame_shows():
    answers: dict[str, int] = {}
    for window in windows(300):
        shown = names(window, len(window.whole) - 1)
        for question in ask(window, random.Random(2)):
            named = NAME.findall(question.text)
            if question.task == "now" and question.text.startswith("Is there a") and named:
                answer = question.answer.split(",")[0]
                assert answer == ("yes" if " ".join(named[0]) in shown else "no"), (question, shown)
                answers[answer] = answers.get(answer, 0) + 1
    assert answers["yes"] > 40 and answers["no"] > 100


def test_nothing_is_asked_of_a_clip_whose_first_visible_frame_brings_something_new():
    red = Shape("circle", "red", "small", 0, 0)
    clip = Clip("appears", (Actor(red, appears=3),), 6, 5)
    for first in range(5):
        window = Window((clip,), tuple((0, frame) for frame in range(first, 6)), 0, 100)
        assert (about_clip(window, 0, random.Random(0)) == []) is (first == 3)


def test_a_window_becomes_carriers_then_labelled_frames(tokenizer):
    window = windows(1, whole=3, carriers=4)[0]
    batch = collate("stream", [(window, ask(window, random.Random(0))[:3])], 0, tokenizer)
    ids, visual = batch.ids[0].tolist(), token_id(tokenizer, VIDEO)
    start = ids.index(visual)
    assert ids[start : start + 4] == [visual] * 4
    at = start + 4
    for index in range(3):
        label = tokenizer.encode(f"{window.label(index)}s:", add_special_tokens=False)
        assert ids[at : at + len(label) + FRAME_TOKENS] == label + [visual] * FRAME_TOKENS
        at += len(label) + FRAME_TOKENS
    assert ids[at] != visual and int(batch.visual_at.sum()) == 4 + 3 * FRAME_TOKENS
    assert batch.positions[0, :at].tolist() == list(range(at))


def test_training_draws_every_layout_and_keeps_batches_small():
    rows = [draw_rows(random.Random(seed), 0.1, 6, training_clips(), carriers=True) for seed in range(300)]
    assert {len(samples[0][0].whole) for samples in rows} == set(WHOLE[0])
    assert any(samples[0][0].carriers for samples in rows)
    for samples in rows:
        window = samples[0][0]
        assert 12 * len(window.whole) + window.carriers <= MAX_POSITIONS
        assert all(set(window.clips) <= set(training_clips()) for window, _questions in samples)
    diffusion = (draw(step, 0, scenes_only=False, scale=0.02, mix="streaming") for step in range(20))
    drawn = [samples[0] for kind, samples, _canvas in diffusion if kind == "stream"]
    assert drawn and not any(window.carriers for window, _questions in drawn)
    assert all(len(questions) == 1 for _window, questions in drawn)


def test_a_standing_question_is_in_front_of_its_picture(tokenizer):
    samples = [(scene, [question]) for scene, question in [WATCH.sample("yes_no", random.Random(0))]]
    batch = collate("watch", samples, 0, tokenizer)
    ids = batch.ids[0].tolist()
    question = tokenizer.encode(samples[0][1][0].text, add_special_tokens=False)
    image = ids.index(token_id(tokenizer, IMAGE))
    assert ids[image - len(question) : image] == question
    assert ids[image : image + VISUAL_TOKENS] == [token_id(tokenizer, IMAGE)] * VISUAL_TOKENS
    answer = tokenizer.encode(samples[0][1][0].answer, add_special_tokens=False)
    assert batch.ids[0][batch.share[0] > 0].tolist() == [*answer, token_id(tokenizer, EOT)]


def test_the_decoder_is_taught_each_clip_of_a_window_by_itself(tokenizer):
    red = Shape("circle", "red", "small", 0, 0)
    first = Clip("appears", (Actor(red),), 4, 5)
    second = Clip("appears", (Actor(red, appears=1),), 4, 6)
    frames = ((0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2))
    window = Window((first, second), frames, 1, 13)
    batch = collate("stream", [(window, about_clip(window, 1, random.Random(0)))], 0, tokenizer)
    labels = batch.changes
    assert labels.shape == (1 + 5 * FRAME_TOKENS, 5) and (labels[0] == IGNORED).all()
    corner = labels[1:].unflatten(0, (5, FRAME_TOKENS))[:, 0].tolist()
    name = name_of("circle", "red")
    assert corner == [
        [name, IGNORED, IGNORED, 1, IGNORED],
        [name, name, SAME, 2, IGNORED],
        [0, IGNORED, IGNORED, 3, 0],
        [name, 0, APPEARED, 4, 1],
        [name, name, SAME, 5, 2],
    ]
