// The editor of the answer's JSON schema: what is wrong with it, and with the answer, as they change.
import { post } from "./api.js";

export const EXAMPLE = {
  type: "object",
  properties: { count: { type: "integer", minimum: 0, maximum: 9 }, color: { enum: ["red", "green", "blue", "yellow"] } },
  required: ["count", "color"],
  additionalProperties: false,
};

/** Sets the text and the tone of a verdict. */
function say(place, valid, text) {
  place.className = `verdict ${valid === null ? "" : valid ? "good" : "bad"}`;
  place.textContent = text;
}

export class SchemaEditor {
  /** `parts`: the text area, the switch, and where the verdicts go; `model()` and `tokens()`: as chosen. */
  constructor({ area, on, status, answer }, model, tokens) {
    Object.assign(this, { area, on, status, answer, model, tokens, number: 0, timer: 0 });
    area.value = JSON.stringify(EXAMPLE, null, 2);
    area.addEventListener("input", () => this.changed());
    on.addEventListener("change", () => this.changed());
  }

  /** The schema, null where none is asked for; throws what is wrong with its JSON. */
  get value() { return this.on.checked ? JSON.parse(this.area.value) : null; }

  changed() {
    clearTimeout(this.timer);
    const number = ++this.number;
    if (!this.on.checked) { say(this.status, null, ""); return; }
    try { JSON.parse(this.area.value); } catch (error) { say(this.status, false, `No JSON yet: ${error.message}`); return; }
    say(this.status, null, "Checking…");
    this.timer = setTimeout(() => this.check(number), 250);
  }

  async check(number) {
    let found;
    try { found = await post("/v1/constraints", this.body()); } catch (error) { found = { valid: false, error }; }
    if (number !== this.number) return; // it was changed meanwhile
    if (found.valid === null) { say(this.status, null, found.warnings.join("\n")); return; }
    say(this.status, found.valid, found.valid ? ["Valid, and the model can keep it.", ...found.warnings ?? []].join("\n") : found.error.message);
  }

  body() {
    return { model: this.model(), max_tokens: this.tokens(), response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(this.area.value) } } };
  }

  /** How far the text of an answer is on its way to be valid JSON; at its end the server judges it. */
  async judge(text, ended) {
    if (!this.on.checked) { say(this.answer, null, ""); return; }
    if (!ended) { say(this.answer, null, text ? `So far: ${text.length} characters of valid JSON` : "No final text yet"); return; }
    let found;
    try { found = await post("/v1/constraints", { ...this.body(), answer: text }); } catch (error) { found = { valid: false, error }; }
    if (found.valid === null) { say(this.answer, null, found.warnings.join("\n")); return; }
    const valid = found.valid && found.answer?.valid;
    say(this.answer, valid, valid ? "The answer is valid under the schema." : (found.answer?.error ?? found.error).message);
  }
}
