// The playground: reads the form, asks the server, and shows each run in a lane.
import { Refused, about, chat, hasToken, models, useToken } from "./api.js";
import { mountDecisions } from "./decisions.js";
import { Lane, element } from "./lane.js";
import { Media } from "./media.js";
import { addDraft, newRun } from "./run.js";
import { save } from "./save.js";
import { SchemaEditor } from "./schema.js";

const $ = (id) => document.getElementById(id);
const number = (id) => $(id).value === "" ? undefined : Number($(id).value);
const NUMBERED = ["max_tokens", "temperature", "seed"];
const MOST_HOLES = 64;

let known = [], lanes = [], stopping = null, last = null;
const pins = new Map();
const media = new Media($("media"), $("media-status"));
const schema = new SchemaEditor({ area: $("schema"), on: $("constrained"), status: $("schema-status"), answer: $("answer-status") },
  () => $("model").value, () => number("max_tokens") ?? model().max_new_tokens);
/** What is attached, as far as the model can see it. */
const attached = () => $("media").disabled ? { parts: [], items: [] } : media;
const model = () => known.find((one) => one.id === $("model").value)?.mmserve ?? {};
const camel = (name) => name.replace(/_(\w)/g, (_, letter) => letter.toUpperCase());

function options(select, names, chosen) {
  select.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === chosen }, name || "the model's")));
}

function chooseModel() {
  const m = model();
  for (const lane of ["a", "b"]) {
    options($(`commit-${lane}`), ["", ...(m.commit_policies ?? [])], "");
    options($(`recompute-${lane}`), ["", ...(m.recompute_policies ?? [])], "");
  }
  $("max_tokens").placeholder = m.max_new_tokens; $("block_length").placeholder = m.block_length;
  $("max_tokens").max = m.max_tokens;
  for (const id of ["steps", "block_length"]) $(id).disabled = !m.diffusion;
  $("media").disabled = !m.images && !m.videos;
  schema.changed();
}

/** What is asked, but for the policies: it can be asked again, and with pins, whose `template` is then the constraint. */
function asked(template) {
  const content = [...attached().parts, { type: "text", text: $("prompt").value }];
  const body = { model: $("model").value, messages: [{ role: "user", content }] };
  for (const name of NUMBERED) body[name] = number(name);
  const diffusion = {};
  if (model().diffusion) Object.assign(diffusion, { steps: number("steps"), blockLength: number("block_length") });
  const wanted = template ? null : schema.value;
  if (wanted) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: wanted } };
  return { body, diffusion, alternatives: number("alternatives") ?? 0, template };
}

/** The policies of one lane: their name, and their fields under `mmserve.diffusion`. */
function policies(lane) {
  const commit = $(`commit-${lane}`).value, recompute = $(`recompute-${lane}`).value;
  const fields = {}, m = model();
  if (commit) fields[camel(commit)] = {};
  if (recompute) fields[recompute === "none" ? "noCache" : camel(recompute)] = {};
  const chosen = `${commit || m.commit_policy} × ${recompute || m.recompute_policy}`;
  return { title: commit || recompute ? chosen : `${chosen} (the model's)`, fields };
}

const plan = (template) => ({ ...asked(template), lanes: [policies("a"), ...($("compare").checked ? [policies("b")] : [])] });

/** Ask one lane's request, and show it until its end. */
async function ask(lane, { body, diffusion, alternatives, template }, fields, signal) {
  const run = lane.run, begun = performance.now();
  const own = { diffusion: { ...diffusion, ...fields }, stream: { drafts: true, alternatives } };
  if (template) own.constraint = { template };
  for await (const { name, data } of chat({ ...body, mmserve: own }, signal)) {
    if (name === "draft") addDraft(run, data, performance.now() - begun);
    else {
      const choice = data.choices[0];
      run.text += choice?.delta.content ?? "";
      if (choice?.finish_reason) Object.assign(run, { reason: choice.finish_reason, stats: { ...data.mmserve, tokens: 0 } });
      if (data.usage && run.stats) run.stats.tokens = data.usage.completion_tokens;
      schema.judge(run.text, false);
    }
    lane.update();
    await new Promise(requestAnimationFrame); // each step is seen, however fast they come
  }
  run.ended = true;
  lane.update();
  for (const warning of run.stats?.warnings ?? []) lane.root.append(element("p", { class: "answer" }, warning));
}

function busy(on) {
  $("run").disabled = on || !known.length; $("stop").disabled = !on; $("retry").disabled = on || !last; $("go-on").disabled = on;
  $("save").disabled = on || !lanes.some((lane) => lane.run.steps.length);
}

/** Run a plan: its lanes one after another, so that none slows another down. */
async function start(made) {
  $("error").textContent = "";
  lanes.forEach((lane) => lane.pause());
  $("lanes").replaceChildren();
  last = made; lanes = [];
  for (const { title } of made.lanes) lanes.push(new Lane($("lanes"), newRun(title, made.body.model), pin));
  marked();
  if ($("lanes").getBoundingClientRect().top > innerHeight) $("output").scrollIntoView();
  stopping = new AbortController();
  busy(true);
  try {
    for (const [index, { fields }] of made.lanes.entries()) {
      $("status").textContent = made.lanes.length > 1 ? `Running ${index + 1} of ${made.lanes.length}…` : "Running…";
      await ask(lanes[index], made, fields, stopping.signal);
    }
    $("status").textContent = "Done.";
    if (!made.template) await schema.judge(lanes[0].run.text, true);
  } catch (error) {
    $("status").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") failed(error);
  } finally {
    for (const lane of lanes) { lane.run.ended = true; lane.update(); }
    busy(false);
  }
}

function failed(error) {
  if (error instanceof Refused && error.status === 401) askToken("The server does not accept this token.");
  else $("error").textContent = error.message;
}

// --- pins

function pin(index, text) { pins.set(index, text); marked(); }

function marked() {
  lanes.forEach((lane) => lane.mark(pins));
  $("pins").hidden = !pins.size;
  $("pin-list").replaceChildren(...[...pins].sort(([a], [b]) => a - b).map(([index, text]) => element("li", {}, element("button", {
    type: "button", "aria-label": `Remove ${JSON.stringify(text)} at ${index + 1}`, onclick: () => { pins.delete(index); marked(); },
  }, `${index + 1}: ${JSON.stringify(text)} ×`))));
}

/** Texts and holes of the canvas with its pins, and the most tokens that they take. */
function templateOf(lane) {
  const fixed = new Map(pins);
  if ($("keep").checked) (lane.shown ?? []).forEach((at, index) => {
    if (at && ["committed", "edited", "pinned"].includes(at.state) && at.text && !/^<.*>$|\ufffd/.test(at.text) && !fixed.has(index)) fixed.set(index, at.text);
  });
  const parts = [];
  let tokens = 0;
  const gap = (size) => { if (size > 0) { parts.push({ hole: { maxTokens: size } }); tokens += size; } };
  let next = 0;
  for (const [index, text] of [...fixed].sort(([a], [b]) => a - b)) {
    gap(index - next);
    if (parts.at(-1)?.text !== undefined) parts.at(-1).text += text; else parts.push({ text });
    tokens += new TextEncoder().encode(text).length; // at most a token a byte
    next = index + 1;
  }
  gap(lane.run.total - next);
  return { parts, tokens };
}

function goOn() {
  const { parts, tokens } = templateOf(lanes[0]);
  const holes = parts.filter((part) => part.hole).length;
  if (!holes || holes > MOST_HOLES) { $("error").textContent = holes ? `At most ${MOST_HOLES} gaps can be left; keep less.` : "Everything is pinned: nothing is left to write."; return; }
  const made = plan({ parts });
  start({ ...made, body: { ...made.body, max_tokens: tokens } });
}

// --- the token, and the beginning

function askToken(why = "") {
  $("token-error").textContent = why;
  $("token-change").hidden = false;
  if (!$("token-dialog").open) $("token-dialog").showModal();
}

async function load() {
  try { known = await models(); } catch (error) { failed(error); return; }
  if (!known.length) { // it is asked again until the first has come
    $("status").textContent = "The models are loading…";
    setTimeout(load, 1000);
    return;
  }
  $("status").textContent = "";
  options($("model"), known.map((one) => one.id));
  chooseModel();
  busy(false);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("run").disabled) return; // the keyboard submits it all the same
  let made;
  try { made = plan(); } catch (error) { $("error").textContent = `The schema is no JSON: ${error.message}`; return; }
  pins.clear();
  start(made);
});
$("stop").addEventListener("click", () => stopping?.abort());
$("retry").addEventListener("click", () => {
  const seed = (last.body.seed ?? 0) + 1;
  $("seed").value = seed;
  start({ ...last, body: { ...last.body, seed } });
});
$("save").addEventListener("click", async () => {
  const size = await save(last.body.messages[0].content.at(-1).text, lanes.map((lane) => lane.run));
  $("status").textContent = `Saved: ${Math.ceil(size / 1000)} kB.`;
});
$("go-on").addEventListener("click", goOn);
$("unpin").addEventListener("click", () => { pins.clear(); marked(); });
$("compare").addEventListener("change", () => { $("policies-b").hidden = !$("compare").checked; });
$("model").addEventListener("change", chooseModel);
$("max_tokens").addEventListener("change", () => schema.changed());
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit(); });
$("token-change").addEventListener("click", () => askToken());
$("token-form").addEventListener("submit", () => { useToken($("token").value); $("token").value = ""; load(); });

busy(false);
const server = await about();
mountDecisions($("decisions"), server.apis, () => ({
  model: $("model").value, input: $("prompt").value, images: attached().items.filter(({ kind }) => kind === "image").map(({ url }) => url),
}));
if (server.tokens && !hasToken()) askToken(); else await load();
