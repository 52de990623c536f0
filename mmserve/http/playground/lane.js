// One run on the page: its figures, its canvas, a player, the token that is looked at, and the text.
import { STATES, canvasAt } from "./run.js";

const ENDS = /^(<\|?[a-z_]*(end|eot|eos|pad)[a-z_]*\|?>|<\/s>|<eos>|<pad>)$/i;
const WORDS = { masked: "masked", draft: "draft", committed: "committed", edited: "edited", pinned: "pinned" };

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** How a token is drawn: spaces at its ends can be seen in names, masks and ends have signs. */
export const glyph = (at) => !at || at.state === "masked" ? "▒" : ENDS.test(at.text) ? "·" : at.text.replace(/\n/g, "↵\n") || "∅";
const named = (text) => ENDS.test(text) ? "end of text" : JSON.stringify(text);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
export const canPin = (at) => at && at.state !== "masked" && at.text !== "" && !ENDS.test(at.text) && !at.text.includes("\ufffd");

export class Lane {
  /** `pin(index, text)` is called for a token or a phrase that is to stay; without it nothing can be pinned. */
  constructor(root, run, pin = null) {
    this.run = run; this.pin = pin; this.step = -1; this.live = !run.ended; this.chosen = null; this.tokens = [];
    this.timer = 0; this.pinned = new Map();
    const number = root.childElementCount + 1, id = (name) => `${name}-${number}`;
    this.stats = element("dl", { class: "stats" });
    this.canvas = element("div", { class: "canvas", role: "group", "aria-label": `Canvas of ${run.title}` });
    this.play = element("button", { type: "button", onclick: () => this.toggle() }, "Play");
    this.range = element("input", { type: "range", id: id("step"), min: 0, max: 0, value: 0, step: 1, "aria-label": "Step",
      oninput: () => { this.pause(); this.live = false; this.show(Number(this.range.value)); } });
    this.at = element("span", { class: "at" });
    this.speed = element("select", { id: id("speed") },
      ...[["0.25", "¼×"], ["0.5", "½×"], ["1", "1×"], ["2", "2×"], ["8", "8×"]].map(([value, name]) => element("option", { value, selected: value === "1" }, name)));
    const move = (by, name, sign) => element("button", { type: "button", "aria-label": name,
      onclick: () => { this.pause(); this.live = false; this.show(this.step + by); } }, sign);
    this.token = element("div", { class: "token", role: "region", "aria-label": "Token" }, element("p", {}, "Point at a token, or move to it with the arrow keys."));
    this.answer = element("p", { class: "answer" });
    this.root = element("section", { class: "lane", "aria-label": run.title }, element("h2", {}, run.title), this.stats, this.canvas,
      element("div", { class: "player", role: "group", "aria-label": "Player" }, move(-1, "Step back", "◂"), this.play, move(1, "Step forward", "▸"),
        this.range, this.at, element("p", { class: "field" }, element("label", { for: id("speed") }, "Speed"), this.speed)),
      element("div", { class: "legend", "aria-label": "States", role: "note" }, ...STATES.map((state) => element("span", { class: `tok ${state}` }, WORDS[state]))),
      this.token, this.answer);
    this.canvas.addEventListener("pointerover", (event) => this.look(event.target));
    this.canvas.addEventListener("focusin", (event) => this.look(event.target));
    this.canvas.addEventListener("click", (event) => this.look(event.target));
    this.canvas.addEventListener("keydown", (event) => this.keys(event));
    root.append(this.root);
    this.figures();
    if (run.steps.length) this.show(run.steps.length - 1);
  }

  /** The run has a new step, more text, or its end. */
  update() {
    if (this.live && this.run.steps.length) this.show(this.run.steps.length - 1);
    else this.bounds();
    this.figures();
  }

  figures() {
    const { run } = this, last = run.steps.at(-1), stats = run.stats;
    const rows = [["Forwards", stats?.forwards ?? last?.forwards ?? 0], ["Time", `${(stats?.times.total ?? last?.ms ?? 0).toFixed(0)} ms`]];
    if (stats) rows.push(["First text", `${stats.times.first_token.toFixed(0)} ms`], ["Tokens a forward", (stats.tokens / Math.max(1, stats.forwards)).toFixed(1)]);
    if (stats?.edits) rows.push(["Edits", stats.edits]);
    if (run.reason) rows.push(["End", run.reason]);
    this.stats.replaceChildren(...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
    this.answer.textContent = run.text;
  }

  bounds() {
    this.range.max = Math.max(0, this.run.steps.length - 1);
    this.range.value = this.step;
    const step = this.run.steps[this.step];
    this.at.textContent = step ? `${this.step + 1} of ${this.run.steps.length}` : "";
    this.range.setAttribute("aria-valuetext", step ? `step ${this.step + 1} of ${this.run.steps.length}, ${step.ms.toFixed(0)} ms` : "none");
  }

  show(step) {
    const before = this.step;
    this.step = Math.min(Math.max(0, step), Math.max(0, this.run.steps.length - 1));
    const canvas = canvasAt(this.run, this.step);
    while (this.tokens.length > canvas.length) this.tokens.pop().remove();
    for (let index = this.tokens.length; index < canvas.length; index++)
      this.tokens.push(this.canvas.appendChild(element("button", { type: "button", tabindex: index ? -1 : 0, "data-index": index })));
    const shown = this.shown ?? [];
    canvas.forEach((at, index) => {
      if (shown[index] === at && shown.length) return;
      const button = this.tokens[index], state = at?.state ?? "masked", end = at && ENDS.test(at.text);
      const fresh = this.step === before + 1 && (state === "committed" || state === "edited") && shown[index]?.state !== state;
      button.className = `tok ${state}${end ? " end" : ""}${fresh ? " fresh" : ""}${this.pinned.has(index) ? " chosen" : ""}`;
      button.style.setProperty("--sure", state === "masked" ? 0 : at.confidence);
      button.textContent = glyph(at);
      button.setAttribute("aria-label", at && state !== "masked" ? `${named(at.text)}, ${WORDS[state]}, ${percent(at.confidence)}` : "masked");
    });
    this.shown = canvas;
    this.bounds();
    if (this.chosen !== null) this.describe();
  }

  toggle() { if (this.timer) this.pause(); else this.start(); }

  start() {
    this.live = false;
    if (this.step >= this.run.steps.length - 1) this.show(0);
    this.play.textContent = "Pause";
    const next = () => {
      if (this.step >= this.run.steps.length - 1) return this.pause();
      const wait = Math.min(1500, Math.max(60, this.run.steps[this.step + 1].ms - this.run.steps[this.step].ms));
      this.timer = setTimeout(() => { this.show(this.step + 1); next(); }, wait / Number(this.speed.value));
    };
    next();
  }

  pause() { clearTimeout(this.timer); this.timer = 0; this.play.textContent = "Play"; }

  look(target) {
    const button = target.closest?.(".tok");
    if (!button) return;
    this.chosen = Number(button.dataset.index);
    this.tokens.forEach((one) => one.tabIndex = one === button ? 0 : -1);
    this.describe();
  }

  keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own, such as Ctrl+P
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by !== undefined && this.tokens.length) {
      const from = this.tokens.indexOf(document.activeElement);
      this.tokens[Math.min(this.tokens.length - 1, Math.max(0, from + by))].focus();
    } else if (event.key.toLowerCase() === "p" && this.pin && canPin(this.shown[this.chosen])) this.pin(this.chosen, this.shown[this.chosen].text);
    else return;
    event.preventDefault();
  }

  describe() {
    const index = this.chosen, at = this.shown?.[index];
    if (this.described === at && this.describedIndex === index) return;
    this.described = at; this.describedIndex = index;
    const masked = !at || at.state === "masked";
    const what = masked ? `Position ${index + 1}: masked` : `Position ${index + 1}: ${named(at.text)}, ${WORDS[at.state]}, ${percent(at.confidence)}`;
    const children = [element("p", {}, what)];
    if (!masked && at.alternatives.length) children.push(element("ul", { class: "others", "aria-label": "Alternatives" }, ...at.alternatives.map(([, text, sure]) => {
      const content = [named(text), element("small", {}, percent(sure))];
      if (!this.pin || !canPin({ state: "draft", text })) return element("li", {}, element("span", {}, ...content));
      const name = `${named(text)}, ${percent(sure)}, pin`;
      return element("li", {}, element("button", { type: "button", "aria-label": name, onclick: () => this.pin(index, text) }, ...content));
    })));
    if (this.pin) {
      const phrase = element("input", { id: `phrase-${index}`, value: canPin(at) ? at.text : "", autocomplete: "off" });
      children.push(element("p", { class: "row" }, element("label", { for: phrase.id }, "Text here"), phrase,
        element("button", { type: "button", onclick: () => phrase.value && this.pin(index, phrase.value) }, "Pin")));
    }
    this.token.replaceChildren(...children);
  }

  /** Mark the positions of `pins`, a map from index to text. */
  mark(pins) {
    this.pinned = pins;
    this.tokens.forEach((button, index) => button.classList.toggle("chosen", pins.has(index)));
  }
}
