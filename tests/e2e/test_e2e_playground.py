"""The playground in a headless Chromium against a real server with the bundled models: each of its functions."""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import MISSING, Page, browser
from clips import clip
from e2e_helpers import EMPTY, Running, running, settings, wait_for
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from test_e2e_http import free_port

from mmserve.config import ModelConfig
from mmserve.core.request import ImagePart, Request, VideoPart
from mmserve.http import pages
from mmserve.http.models import Models
from mmserve.reference.tasks import sample

FILES = Path(pages.__file__).parent / "playground"
QUESTION = "How many shapes are there?"


def page_settings(**server: Any) -> Any:
    models = (ModelConfig(path="bundled"), ModelConfig(path="bundled-causal"))
    return dataclasses.replace(settings(server={"http_port": free_port(), **server}), models=models)


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    if MISSING:
        pytest.skip(MISSING)
    with running(page_settings()) as found:
        yield found
        found.assert_serves()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("downloads")) as found:
        yield found


def url(served: Running) -> str:
    return f"http://127.0.0.1:{served.background.config.server.http_port}/"


@pytest.fixture
def page(served: Running, chromium: Page) -> Iterator[Page]:
    """The page anew, on a desktop in the light; nothing may be in the console at the end."""
    chromium.emulate()
    chromium.open(url(served))
    chromium.wait("the models", chromium["run"].is_enabled)
    yield chromium
    assert chromium.console() == []
    chromium.open("about:blank")


def ended(page: Page) -> bool:
    return page["status"].text == "Done."


def ask(page: Page, prompt: str = QUESTION, **fields: Any) -> None:
    """Fill the form and run it to its end."""
    page.fill("prompt", prompt)
    for name, value in fields.items():
        if page[name].tag_name == "select":
            page.choose(name, str(value))
        else:
            page.fill(name, str(value))
    page.click("run")
    page.wait(f"an answer; there is {page['error'].text!r}", lambda: ended(page) or page["error"].text)
    assert page["error"].text == ""


def texts(page: Page) -> list[str]:
    return [each.text for each in page.all(".lane > .answer")]


def figure(page: Page, name: str, lane: int = 0) -> str:
    found = dict(re.findall(r"(.+?)\n(.+)", page.all(".stats")[lane].text))
    return found.get(name, "") or re.search(rf"{name} ?\n?(\S+)", page.all(".stats")[lane].text)[1]  # type: ignore[index]


def classes(page: Page, lane: int = 0) -> list[str]:
    """The state of each position of a canvas."""
    script = "return [...document.querySelectorAll('.canvas')[arguments[0]].children].map((one) => one.classList[1])"
    return page.run(script, lane)  # type: ignore[no-any-return]


def scrub(page: Page, step: int) -> None:
    slider = page.one(".lane input[type=range]")
    page.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", slider, step)


PLAIN = {"commit-a": "low_confidence", "recompute-a": "none", "max_tokens": 12}


def test_a_run_is_what_any_client_gets_and_its_canvas_can_be_gone_through(served: Running, page: Page) -> None:
    expected = served.client.generate(QUESTION, max_new_tokens=12, commit="low_confidence", recompute="none")
    ask(page, **PLAIN)
    assert texts(page) == [expected.text]
    assert figure(page, "Forwards") == str(expected.forwards) and "ms" in page.one(".stats").text
    slider = page.one(".lane input[type=range]")
    assert int(slider.get_property("max")) == expected.forwards - 1, "every step came"  # type: ignore[arg-type]
    committed = []
    for step in range(expected.forwards):
        scrub(page, step)
        committed.append(classes(page).count("committed"))
    assert committed == sorted(committed) and committed[0] >= 1 and len(classes(page)) == 12
    scrub(page, 0)
    assert "draft" in classes(page)
    page.named("Step forward").click()
    assert page.one(".at").text == f"2 of {expected.forwards}"
    page.named("Step back").click()
    assert page.one(".at").text.startswith("1 of")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert page.one(".at").text.startswith("2 of"), "by keyboard, too"


def test_colours_tell_states_and_confidence(page: Page) -> None:
    ask(page, **PLAIN)
    scrub(page, 1)
    shown = page.run(
        """return [...document.querySelector('.canvas').children].map((one) => [one.classList[1],
        Number(one.style.getPropertyValue('--sure')), getComputedStyle(one).backgroundColor])"""
    )
    assert {state for state, _sure, _colour in shown} >= {"draft", "committed"}
    assert all(0 <= sure <= 1 for _state, sure, _colour in shown)
    by_state = {state: {colour for one, _sure, colour in shown if one == state} for state in ("draft", "committed")}
    assert not by_state["draft"] & by_state["committed"]
    sures = {colour: sure for state, sure, colour in shown if state == "draft"}
    assert len(sures) > 1, "drafts of unlike confidence look unlike"


def test_playback_has_a_speed_and_can_be_paused(page: Page) -> None:
    ask(page, **PLAIN)
    page.run("document.querySelector('.player select').value = '8'")
    scrub(page, 0)
    page.named("Play").click()
    page.wait("the end", lambda: page.one(".at").text.split()[0] == page.one(".at").text.split()[2])
    assert page.named("Play")
    page.run("document.querySelector('.player select').value = '0.25'")
    page.named("Play").click()
    page.named("Pause").click()
    stood = page.one(".at").text
    assert stood.split()[0] != stood.split()[2] and page.named("Play")


def test_alternatives_on_hover_and_on_focus(page: Page) -> None:
    ask(page, **PLAIN)
    scrub(page, 0)
    first, second = page.all(".canvas .tok")[:2]
    ActionChains(page.driver).move_to_element(first).perform()
    assert page.one(".token").text.startswith("Position 1:")
    assert len(page.all(".others li")) == 4
    page.run("arguments[0].focus()", second)
    assert page.one(".token").text.startswith("Position 2:")
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    assert page.one(".token").text.startswith("Position 1:")
    page.driver.switch_to.active_element.send_keys(Keys.END)
    assert page.one(".token").text.startswith("Position 12:")
    shares = [float(each.text.rstrip("%")) for each in page.all(".others small")]
    assert shares == sorted(shares, reverse=True)
    assert re.fullmatch(r'(".*"|end of text), \w+, [\d.]+%', first.accessible_name)


def test_tokens_and_phrases_are_pinned_and_the_run_goes_on(page: Page) -> None:
    ask(page, **{**PLAIN, "max_tokens": 16})
    page.run("arguments[0].focus()", page.all(".canvas .tok")[2])
    page.fill("phrase-2", "red circle")
    page.named("Pin").click()
    assert page["pin-list"].text.startswith('3: "red circle"')
    assert "chosen" in page.all(".canvas .tok")[2].get_attribute("class")  # type: ignore[operator]
    page.click("go-on")
    page.wait("an answer with it", lambda: ended(page) and "red circle" in texts(page)[0])
    pinned = "".join(
        each.text for each in page.all(".tok.pinned") if each.find_elements(By.XPATH, "./ancestor::*[@class='canvas']")
    )
    assert "circle" in pinned
    page.click("unpin")
    assert not page["pins"].is_displayed()
    page.run("arguments[0].focus()", page.one(".canvas .tok.pinned"))
    page.driver.switch_to.active_element.send_keys("p")
    assert len(page.all("#pin-list li")) == 1
    page.one("#pin-list button").click()
    assert not page.all("#pin-list li")


def test_an_alternative_can_be_pinned_and_what_is_committed_kept(page: Page) -> None:
    ask(page, "What is 3 + 4?", **{**PLAIN, "max_tokens": 8})
    scrub(page, 7)
    kept = texts(page)[0]
    page.run("arguments[0].focus()", page.all(".canvas .tok")[3])
    other = next(each for each in page.all(".others button") if each.is_enabled())
    text = json.loads(other.accessible_name.rpartition(", ")[0].rpartition(", ")[0])
    other.click()
    page.click("keep")
    page.click("go-on")
    page.wait("an answer with both", lambda: ended(page) or page["error"].text)
    assert page["error"].text == "" and texts(page)[0].startswith(kept) and text in texts(page)[0]


def test_stop_frees_the_server_and_retry_takes_the_next_seed(served: Running, page: Page) -> None:
    page.fill("prompt", QUESTION)
    page.fill("max_tokens", "700")
    page.choose("commit-a", "low_confidence")
    page.choose("recompute-a", "none")
    page.click("run")
    page.wait("a canvas", lambda: page.all(".canvas .tok.committed"))
    assert not page["run"].is_enabled()
    page.click("stop")
    page.wait("the stop", lambda: page["status"].text == "Stopped.")
    wait_for("an empty engine", lambda: served.engine.stats() == EMPTY)
    assert page["retry"].is_enabled() and set(classes(page)) - {"committed"}, "it is not done"
    page.fill("seed", "5")
    ask(page, max_tokens=8, temperature=1)
    page.click("retry")
    page.wait("the retry", lambda: page["run"].is_enabled())
    assert page["seed"].get_property("value") == "6"
    assert (
        texts(page)[0]
        == served.client.generate(
            QUESTION, max_new_tokens=8, temperature=1, seed=6, commit="low_confidence", recompute="none"
        ).text
    )


def test_the_schema_is_judged_as_it_is_written_and_so_is_the_answer(page: Page) -> None:
    page.run("document.getElementById('schema-editor').open = true")
    page.click("constrained")
    page.wait("a verdict", lambda: page["schema-status"].text.startswith("Valid"))
    page.fill("schema", '{"type": ')
    assert page["schema-status"].text.startswith("No JSON yet")
    page.fill("schema", '{"type": "strange"}')
    page.wait("a refusal", lambda: "must be one or several of" in page["schema-status"].text)
    assert "bad" in page["schema-status"].get_attribute("class")  # type: ignore[operator]
    page.fill("schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    page.wait("a verdict", lambda: page["schema-status"].text.startswith("Valid"))
    ask(page, max_tokens=40)
    page.wait("the judgement", lambda: "valid under the schema" in page["answer-status"].text)
    assert isinstance(json.loads(texts(page)[0])["n"], int)
    page.fill("max_tokens", "2")
    page.run("arguments[0].dispatchEvent(new Event('change'))", page["max_tokens"])
    page.wait("a refusal of the budget", lambda: "max_tokens" in page["schema-status"].text)


def test_a_schema_that_only_a_request_can_check_is_neither_good_nor_bad(
    served: Running, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine, "check_constraint", lambda request, answer: None)
    page.run("document.getElementById('schema-editor').open = true")
    page.click("constrained")
    page.wait("no verdict", lambda: "not checked" in page["schema-status"].text)
    assert str(page["schema-status"].get_attribute("class")).split() == ["verdict"]
    ask(page, max_tokens=40)
    page.wait("no judgement", lambda: "not checked" in page["answer-status"].text)


def seen(served: Running, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests as the engine gets them from now on."""
    found: list[Request] = []
    submit = served.engine.submit
    monkeypatch.setattr(
        served.engine, "submit", lambda request, sink: (found.append(request), submit(request, sink))[1]
    )
    return found


def test_pictures_and_clips_come_from_files(
    served: Running, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = seen(served, monkeypatch)
    picture, question = sample("count", random.Random(3))
    (tmp_path / "scene.png").write_bytes(picture.png())
    (tmp_path / "clip.mp4").write_bytes(clip())
    page["files"].send_keys(str(tmp_path / "scene.png"))
    page.wait("the picture", lambda: page.all("#attached img"))
    expected = served.client.generate(question.text, images=[picture.png()], max_new_tokens=12)
    ask(page, question.text, max_tokens=12)
    assert texts(page) == [expected.text]
    page.named("Remove scene.png").click()
    page["files"].send_keys(str(tmp_path / "clip.mp4"))
    page.wait("the clip", lambda: page.all("#attached video"))
    ask(page, "What moves?", max_tokens=12)
    assert [type(part) for part in requests[-1].messages[0].parts[:-1]] == [VideoPart]
    page.named("Remove clip.mp4").click()
    page.click("sample")
    page.wait("the sample", lambda: page.all("#attached img"))
    ask(page, max_tokens=12)
    [part] = requests[-1].messages[0].parts[:-1]
    assert isinstance(part, ImagePart) and part.data == (FILES / "sample.png").read_bytes()


def test_pictures_and_clips_come_from_the_webcam(served: Running, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = seen(served, monkeypatch)
    page.click("webcam")
    page.wait("the preview", lambda: page.run("return document.getElementById('preview').videoWidth"))
    page.click("shoot")
    page.wait("the picture", lambda: page.all("#attached img"))
    ask(page, max_tokens=8)
    assert [type(part) for part in requests[-1].messages[0].parts[:-1]] == [ImagePart]
    page.named("Remove picture of the webcam").click()
    page.click("record")
    page.wait("the clip", lambda: page.all("#attached video"))
    ask(page, "What moves?", max_tokens=8)
    assert [type(part) for part in requests[-1].messages[0].parts[:-1]] == [VideoPart]
    page.click("record")
    page.click("webcam")
    assert not page["camera"].is_displayed()
    page.wait("the end of the clip", lambda: not page["record"].get_property("disabled"))
    assert len(page.all("#attached video")) == 1 and page["media-status"].text == "", "a clip that was cut is dropped"


def test_two_policies_side_by_side(page: Page) -> None:
    page.click("compare")
    ask(page, **{**PLAIN, "max_tokens": 16, "commit-b": "threshold", "recompute-b": "dual"})
    titles = [each.text for each in page.all(".lane h2")]
    assert titles == ["low_confidence × none", "threshold × dual"]
    assert int(figure(page, "Forwards", 0)) > int(figure(page, "Forwards", 1)) >= 1
    assert all("ms" in each.text for each in page.all(".stats"))
    assert len(texts(page)) == 2
    page.shot("compared")


def test_a_next_token_model_fills_its_canvas_from_the_left(served: Running, page: Page) -> None:
    page.choose("model", "bundled-causal")
    assert not page["steps"].is_enabled()
    ask(page, max_tokens=8)
    assert texts(page) == [served.client.generate(QUESTION, model="bundled-causal", max_new_tokens=8).text]
    page.choose("model", "bundled")


def tag(page: Page) -> None:
    """Mark the lane that is shown, so that it is known from one of a later run."""
    page.run("document.querySelector('.lane').dataset.tagged = ''")


def test_the_keyboard_starts_no_run_beside_another(served: Running, page: Page) -> None:
    page.fill("prompt", QUESTION)
    page.fill("max_tokens", "700")
    page.choose("commit-a", "low_confidence")
    page.choose("recompute-a", "none")
    page["prompt"].send_keys(Keys.CONTROL, Keys.ENTER)
    page.wait("a canvas", lambda: page.all(".canvas .tok.committed"))
    tag(page)
    page["prompt"].send_keys(Keys.CONTROL, Keys.ENTER)
    assert page.all(".lane[data-tagged]") and not page["run"].is_enabled()
    page.click("stop")
    page.wait("the stop", lambda: page["status"].text == "Stopped.")
    wait_for("an empty engine", lambda: served.engine.stats() == EMPTY)


def test_keys_of_the_browser_pin_nothing(page: Page) -> None:
    ask(page, **PLAIN)
    press = """const token = document.querySelector('.canvas .tok'); token.focus();
    return token.dispatchEvent(new KeyboardEvent("keydown", { bubbles: true, cancelable: true, ...arguments[0] }))"""
    for name in ("ctrlKey", "metaKey", "altKey"):
        assert page.run(press, {"key": "p", name: True}), f"{name} and p are left to the browser"
        assert page.run(press, {"key": "ArrowLeft", name: True})
    assert not page.all("#pin-list li")
    assert not page.run(press, {"key": "p"}) and page.all("#pin-list li")


def test_a_model_without_eyes_is_sent_no_pictures(served: Running, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    described = Models._described

    def blind(models: Models, name: str) -> dict[str, Any]:
        found = described(models, name)
        return {**found, "mmserve": {**found["mmserve"], "images": False, "videos": False}}

    monkeypatch.setattr(Models, "_described", lambda self, name: (blind if "causal" in name else described)(self, name))
    page.open(url(served))
    page.wait("the models", page["run"].is_enabled)
    page.click("sample")
    page.wait("the sample", lambda: page.all("#attached img"))
    page.choose("model", "bundled-causal")
    page.run("""const ask = window.fetch; window.bodies = [];
    window.fetch = (path, how) => { window.bodies.push(how?.body ?? ""); return ask(path, how); };""")
    ask(page, max_tokens=4)
    [body] = [each for each in page.run("return window.bodies") if "messages" in each]
    assert [part["type"] for part in json.loads(body)["messages"][0]["content"]] == ["text"]
    page.choose("model", "bundled")


def test_pins_go_on_whatever_the_schema_holds(page: Page) -> None:
    ask(page, **PLAIN)
    page.run("arguments[0].focus()", page.all(".canvas .tok")[2])
    page.fill("phrase-2", "red")
    page.named("Pin").click()
    page.run("document.getElementById('schema-editor').open = true")
    page.click("constrained")
    page.fill("schema", "{")
    tag(page)
    page.click("go-on")
    assert not page.all(".lane[data-tagged]")
    page.wait("an answer", lambda: ended(page) or page["error"].text)
    assert page["error"].text == ""


def test_an_error_is_told(page: Page) -> None:
    page.fill("prompt", QUESTION)
    page.fill("max_tokens", "0")
    page.click("run")
    assert page.run("return document.getElementById('max_tokens').validity.rangeUnderflow")
    assert page["error"].text == "" and not page.all(".lane"), "the form itself refuses it"


SYNTHETIC = """
const { addDraft, newRun } = await import("/playground/run.js"), { saved } = await import("/playground/save.js");
const draw = (n) => Math.floor(Math.random() * n), run = newRun("worst case", "m"), left = new Set(Array(256).keys());
const token = () => [draw(50000), `token${draw(3000)}`, Math.random()];
for (let step = 0; step < 48; step++) {
  const positions = [...left].map((index) => {
    const [id, text, confidence] = token();
    return { index, id, text, confidence, state: "draft", alternatives: [token(), token(), token(), token()] };
  });
  for (const at of positions.slice(0, 6)) { at.state = "committed"; left.delete(at.index); }
  addDraft(run, { total: 256, forwards: step + 1, positions }, step * 20);
}
run.ended = true;
return (await saved("p", [run])).length;
"""


def download(page: Page) -> Path:
    before = set(page.downloads.iterdir())
    page.click("save")

    def arrived() -> Path | None:
        new = [each for each in set(page.downloads.iterdir()) - before if each.suffix == ".html"]
        return new[0] if new else None

    return page.wait("the file", arrived)  # type: ignore[no-any-return]


def test_a_saved_run_is_one_small_file_that_replays_offline(page: Page) -> None:
    ask(page, max_tokens=96, steps=24, **{"commit-a": "low_confidence", "recompute-a": "none", "block_length": 96})
    answer, states = texts(page)[0], classes(page)
    assert len(states) == 96 and page.one(".at").text.endswith("of 24")
    file = download(page)
    print(f"saved: {file.stat().st_size} bytes")
    assert file.stat().st_size <= 150_000
    content = file.read_text()
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", content)
    page.driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        page.open(file.as_uri())
        page.wait("the replay", lambda: page.all(".canvas .tok"))
        assert texts(page) == [answer] and page["asked"].text == QUESTION
        assert classes(page) == states
        scrub(page, 0)
        assert classes(page).count("committed") < states.count("committed")
        page.named("Step forward").click()
        assert page.one(".at").text == "2 of 24"
        page.run("arguments[0].focus()", page.all(".canvas .tok")[1])
        assert page.all(".others li") and not page.all(".token input"), "nothing can be pinned here"
        assert page.unnamed() == []
        page.shot("saved")
    finally:
        online = {**offline, "offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
        page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", online)


def test_a_saved_run_has_the_prompt_that_was_run(page: Page) -> None:
    ask(page, max_tokens=8)
    page.fill("prompt", "What else?")
    page.open(download(page).as_uri())
    page.wait("the replay", lambda: page.all(".canvas .tok"))
    assert page["asked"].text == QUESTION


def test_the_largest_run_of_256_tokens_in_48_steps_is_small_when_saved(page: Page) -> None:
    size = page.run(f"return (async () => {{ {SYNTHETIC} }})()")
    print(f"random tokens, four alternatives each: {size} bytes")
    assert size <= 300_000


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(360, True, id="360-dark"),
        pytest.param(1280, False, id="1280-light"),
        pytest.param(360, False, id="360-light", marks=pytest.mark.slow),
        pytest.param(1280, True, id="1280-dark", marks=pytest.mark.slow),
    ],
)
def test_it_fits_a_phone_and_the_dark_and_all_has_names(page: Page, width: int, dark: bool) -> None:
    page.emulate(width=width, height=740, dark=dark, reduced=True)
    page.run("for (const one of document.querySelectorAll('details')) one.open = true")
    page.click("constrained")
    page.click("compare")
    page.click("sample")
    page.click("webcam")
    page.wait("the preview", lambda: page.run("return document.getElementById('preview').videoWidth"))
    page.click("constrained")
    ask(page, "Describe the picture.", max_tokens=32, **{"commit-b": "low_confidence"})
    scrub(page, 0)
    page.run("arguments[0].focus()", page.all(".canvas .tok")[1])
    page.fill("phrase-1", "a longer phrase that takes room")
    page.named("Pin").click()
    assert page.run("return document.documentElement.scrollWidth") <= width
    wide = page.run(
        """return [...document.querySelectorAll('main *, header *')].filter((one) => !one.closest('.hidden-input')
        && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 90))"""
    )
    assert wide == []
    assert page.unnamed() == []
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) > 3 * 128
    assert light != dark
    page.run("document.querySelector('.tok').classList.add('fresh')")
    assert page.run("return getComputedStyle(document.querySelector('.fresh')).animationName") == "none"
    page.click("webcam")
    page.shot(f"{width}-{'dark' if dark else 'light'}")


def luminance(colour: str) -> float:
    """Relative luminance as of WCAG 2.2, of ``rgb(…)`` or of ``color(srgb …)``."""
    numbers = [float(n) for n in re.findall(r"[\d.]+", colour)[:3]]
    shares = numbers if colour.startswith("color(srgb") else [n / 255 for n in numbers]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_state_can_be_read_at_any_confidence(page: Page, dark: bool) -> None:
    page.emulate(dark=dark)
    ask(page, max_tokens=8)
    for state in ("masked", "draft", "committed", "edited", "pinned"):
        for sure in (0, 0.5, 1):
            ink, paper = page.run(
                """const one = document.querySelector('.canvas .tok');
                one.className = `tok ${arguments[0]}`; one.style.setProperty('--sure', arguments[1]);
                const style = getComputedStyle(one); return [style.color, style.backgroundColor]""",
                state,
                sure,
            )
            high, low = sorted((luminance(ink), luminance(paper)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (state, sure, ink, paper)


def test_all_of_it_can_be_reached_by_keyboard(page: Page) -> None:
    ask(page, max_tokens=8)
    wanted = {
        "prompt",
        "files",
        "sample",
        "webcam",
        "max_tokens",
        "commit-a",
        "compare",
        "run",
        "retry",
        "save",
        "step-1",
    }
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        reached.add(page.run("return document.activeElement.id || document.activeElement.className"))
    assert wanted <= reached and any("tok" in each for each in reached), wanted - reached
    page.fill("prompt", QUESTION)
    page["prompt"].send_keys(Keys.CONTROL + Keys.ENTER)
    page.wait("a run", lambda: ended(page))


def test_a_token_is_asked_for_and_kept_in_memory_alone(chromium: Page, tmp_path: Path) -> None:
    if MISSING:
        pytest.skip(MISSING)
    with running(page_settings(auth_tokens=("secret-1",))) as served:
        served.client.close()
        chromium.open(url(served))
        chromium.wait("the dialog", lambda: chromium["token"].is_displayed())
        assert chromium.unnamed() == [] and chromium.console() == [], "nothing is asked without a token"
        chromium["token"].send_keys("wrong", Keys.ENTER)
        chromium.wait("a refusal", lambda: chromium["token-error"].text)
        chromium["token"].send_keys("secret-1", Keys.ENTER)
        chromium.wait("the models", chromium["run"].is_enabled)
        ask(chromium, max_tokens=4)
        held = chromium.run("return [localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert held == [0, 0, "", url(served)] and chromium["token"].get_property("value") == ""
        assert all(entry["message"].find("401") > 0 for entry in chromium.console()), "the wrong token's"
        chromium.driver.refresh()
        chromium.wait("the dialog again", lambda: chromium["token"].is_displayed())
        chromium.open("about:blank")


def test_the_page_comes_from_this_host_alone(served: Running, page: Page) -> None:
    ask(page, max_tokens=4)
    loaded = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert loaded and all(name.startswith((url(served), "blob:", "data:")) for name in loaded)
    for file in FILES.iterdir():
        if file.suffix != ".png":
            assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", file.read_text()), file.name
    port = served.background.config.server.http_port
    assert port is not None
    for path in ("/", *(f"{pages.FOLDER}/{file.name}" for file in FILES.iterdir()), f"{pages.FOLDER}/about.json"):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        assert response.status == 200 and headers["content-security-policy"] == pages.POLICY, path
        assert (
            headers["x-content-type-options"] == "nosniff"
            and headers["x-request-id" if path == "" else "referrer-policy"]
        )
        if "etag" in headers:
            connection.request("GET", path, headers={"if-none-match": headers["etag"]})
            assert connection.getresponse().status == 304
        connection.close()
    assert "unsafe" not in pages.POLICY and "http" not in pages.POLICY


def test_typed_questions_are_decided_about_the_prompt_and_its_picture(served: Running, page: Page) -> None:
    page.fill("prompt", "A red circle is left of a blue square.")
    page.click("sample")
    page.wait("the sample", lambda: page.all("#attached img"))
    page.fill("question-1", "Is there a red circle?")
    page.click("add-question")
    page.fill("question-2", "Which color has the circle?")
    page.choose("kind-2", "choice")
    page.click("decide")
    page.wait("the answers", lambda: len(page.all(".chances")) == 2 or page.one("#decisions .bad").text)
    assert page.one("#decisions .bad").text == ""
    for group, count in zip(page.all(".chances"), (2, 4), strict=True):
        values = page.run("return [...arguments[0].querySelectorAll('meter')].map((one) => one.value)", group)
        assert len(values) == count and sum(values) == pytest.approx(1, abs=1e-3)
    assert page.unnamed() == [] and "forward" in page["decisions"].text
    page.choose("kind-2", "score")
    page.fill("names-2", "none, some, many")
    page.run(
        """document.querySelector('.chances').remove(); document.getElementById('decide').click();
        document.getElementById('names-2').value = 'few'; document.getElementById('add-question').click()"""
    )
    page.wait("the answers", lambda: len(page.all(".chances")) == 2 or page.one("#decisions .bad").text)
    names = page.run(
        "return [...arguments[0].querySelectorAll('meter')].map((one) => one.ariaLabel)", page.all(".chances")[1]
    )
    assert (page.one("#decisions .bad").text, names) == ("", ["none", "some", "many"]), "as they were asked"
    page.named("Remove question 3").click()
    page.named("Remove question 2").click()
    assert len(page.all(".questions > li")) == 1
    page.shot("decisions")
