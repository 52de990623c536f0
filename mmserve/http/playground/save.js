// Runs as one HTML file that replays without a server: the page's own modules, its style, and the packed runs.
import { pack } from "./run.js";

const own = async (name) => (await fetch(`/playground/${name}`)).text();
// Modules as one: without imports of one another, and without what would end a script element.
const plain = (module) => module.replace(/^import .*;$/gm, "").replace(/^export /gm, "").replace(/<\/script/gi, "<\\/script");

async function squeezed(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  let binary = "";
  for (let i = 0; i < bytes.length; i += 0x8000) binary += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(binary);
}

const BOOT = `
const held = JSON.parse(document.getElementById("runs").textContent);
const bytes = Uint8Array.from(atob(held), (c) => c.charCodeAt(0));
const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
const { prompt, runs } = JSON.parse(text);
document.getElementById("asked").textContent = prompt;
const lanes = document.getElementById("lanes");
for (const run of runs) new Lane(lanes, unpack(run));
`;

/** The file's text. */
export async function saved(prompt, runs) {
  const [style, run, lane] = await Promise.all(["style.css", "run.js", "lane.js"].map(own));
  const data = await squeezed(JSON.stringify({ prompt, runs: runs.map(pack) }));
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>A run of mmserve</title>
<style>${style}</style>
</head>
<body>
<header><h1>mmserve <span>a saved run</span></h1></header>
<main class="saved"><section aria-label="Answer"><h2>Prompt</h2><p id="asked" class="answer"></p><div id="lanes"></div></section></main>
<script type="application/json" id="runs">${JSON.stringify(data)}</script>
<script type="module">${plain(run)}${plain(lane)}${BOOT}</script>
</body>
</html>
`;
}

/** Give the file to the user. */
export async function save(prompt, runs) {
  const text = await saved(prompt, runs);
  const url = URL.createObjectURL(new Blob([text], { type: "text/html" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `mmserve-run-${new Date().toISOString().slice(0, 19).replace(/[:T]/g, "-")}.html`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  return text.length;
}
