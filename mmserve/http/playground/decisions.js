// The panel of typed decisions: there where the server has `/v1/decisions`. Its context is the prompt, with its pictures.
import { post } from "./api.js";
import { element } from "./lane.js";

export const PATH = "/v1/decisions";
const KINDS = { yes_no: "yes or no", choice: "choice", score: "score" };
const percent = (share) => `${(100 * share).toFixed(1)}%`;

/** One question of the form, and its answer. */
class Question {
  constructor(number, remove) {
    const id = (name) => `${name}-${number}`;
    this.id = `q${number}`;
    this.kind = element("select", { id: id("kind"), onchange: () => this.changed() }, ...Object.entries(KINDS).map(([value, name]) => element("option", { value }, name)));
    this.text = element("input", { id: id("question"), autocomplete: "off" });
    this.options = element("input", { id: id("names"), autocomplete: "off", value: "red, green, blue, yellow" });
    this.answer = element("div", { role: "status" });
    const field = (label, control) => element("p", { class: "field" }, element("label", { for: control.id }, label), control);
    this.among = field("Answers, with commas between", this.options);
    this.root = element("li", {}, element("div", { class: "grid" }, field("Question", this.text), field("Kind", this.kind), this.among),
      this.answer, element("button", { type: "button", "aria-label": `Remove question ${number}`, onclick: () => { this.root.remove(); remove(this); } }, "Remove"));
    this.changed();
  }

  changed() { this.among.hidden = this.kind.value === "yes_no"; }

  get body() {
    const names = this.options.value.split(",").map((name) => name.trim()).filter(Boolean), type = this.kind.value;
    const own = type === "choice" ? { options: names.map((name) => ({ name })) } : type === "score" ? { levels: names } : {};
    return { id: this.id, type, question: this.text.value, ...own };
  }

  /** Show the answer to what was asked, which may differ from the form by now. */
  show(asked, { probabilities, label_mass }) {
    const names = asked.type === "score" ? asked.levels : Object.keys(probabilities);
    this.answer.replaceChildren(element("ul", { class: "chances", "aria-label": "Probabilities" }, ...Object.values(probabilities).map((share, i) =>
      element("li", {}, element("span", {}, names[i]), element("meter", { value: share, min: 0, max: 1, "aria-label": names[i] }), element("span", {}, percent(share))))),
    element("p", {}, `The answers have ${percent(label_mass)} of the model's probability.`));
  }
}

/** Fill `root`, which is hidden, where `apis` has the path. `context()`: model, text and pictures as they are chosen. */
export function mountDecisions(root, apis, context) {
  root.hidden = !apis.includes(PATH);
  if (root.hidden) return;
  let made = 0, questions = [];
  const list = element("ol", { class: "questions", "aria-label": "Questions" }), status = element("p", { role: "status" }), problem = element("p", { role: "alert", class: "bad" });
  const add = () => {
    const question = new Question(++made, (gone) => { questions = questions.filter((one) => one !== gone); });
    questions.push(question);
    list.append(question.root);
  };
  const decide = async () => {
    problem.textContent = "";
    const { model, input, images } = context();
    const asked = questions.map((one) => [one, one.body]);
    try {
      const found = await post(PATH, { model, input, images, questions: asked.map(([, body]) => body) });
      for (const [one, body] of asked) one.show(body, found.answers[body.id]);
      status.textContent = `${asked.length} in ${found.mmserve.forwards} forward ${found.mmserve.forwards === 1 ? "pass" : "passes"}.`;
    } catch (error) { problem.textContent = error.message; }
  };
  root.append(element("h2", { id: "decisions-title" }, "Decisions"),
    element("p", {}, "Questions about the prompt and its pictures, all of them answered with probabilities at once."), list,
    element("p", { class: "row" }, element("button", { type: "button", id: "add-question", onclick: add }, "Add a question"),
      element("button", { type: "button", id: "decide", class: "main", onclick: decide }, "Decide")), status, problem);
  add();
}
