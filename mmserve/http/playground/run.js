// A run: what was asked, each step's changes of the canvas, and what came of it. Packed, it is what a saved page holds.

export const STATES = ["masked", "draft", "committed", "edited", "pinned"];

export function newRun(title, asked) {
  return { title, asked, total: 0, steps: [], text: "", reason: "", stats: null, ended: false };
}

/** Take in a draft as the server sends it; `ms` is the time since the request. */
export function addDraft(run, draft, ms) {
  run.total = draft.total;
  run.steps.push({ ms, forwards: draft.forwards, positions: draft.positions });
}

/** The canvas after step number `step` (from 0): for each position its latest token, or null. */
export function canvasAt(run, step) {
  const canvas = new Array(run.total).fill(null);
  for (let i = 0; i <= step && i < run.steps.length; i++)
    for (const at of run.steps[i].positions) canvas[at.index] = at;
  return canvas;
}

/** The run as small JSON: texts are numbered, probabilities are thousandths, positions are rows of
 * numbers; ids of tokens are left out. */
export function pack(run) {
  const texts = [], numbers = new Map();
  const text = (one) => {
    if (!numbers.has(one)) numbers.set(one, texts.push(one) - 1);
    return numbers.get(one);
  };
  const steps = run.steps.map(({ ms, forwards, positions }) => [
    Math.round(ms), forwards,
    positions.map((at) => [
      at.index, STATES.indexOf(at.state), text(at.text), Math.round(at.confidence * 1000),
      ...at.alternatives.flatMap(([, other, sure]) => [text(other), Math.round(sure * 1000)]),
    ]),
  ]);
  const { title, asked, total, text: answer, reason, stats, ended } = run;
  return { title, asked, total, answer, reason, stats, ended, texts, steps };
}

export function unpack({ title, asked, total, answer, reason, stats, ended, texts, steps }) {
  const position = ([index, state, text, sure, ...rest]) => {
    const alternatives = [];
    for (let i = 0; i < rest.length; i += 2) alternatives.push([null, texts[rest[i]], rest[i + 1] / 1000]);
    return { index, state: STATES[state], id: null, text: texts[text], confidence: sure / 1000, alternatives };
  };
  const found = steps.map(([ms, forwards, rows]) => ({ ms, forwards, positions: rows.map(position) }));
  return { title, asked, total, text: answer, reason, stats, ended, steps: found };
}
