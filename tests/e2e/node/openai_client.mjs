// The official npm client against a running server: node openai_client.mjs URL PICTURE; prints one JSON object.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [url, picture] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const found = {};
const messages = [{ role: "user", content: "How many shapes are there?" }];
const short = { model: "bundled", messages, max_completion_tokens: 16 };

found.models = [];
for await (const model of client.models.list()) found.models.push(model.id);

const chat = await client.chat.completions.create({ ...short, logprobs: true, top_logprobs: 2 });
found.chat = { text: chat.choices[0].message.content, reason: chat.choices[0].finish_reason, usage: chat.usage };
found.alternatives = chat.choices[0].logprobs.content.map((token) => token.top_logprobs.length);

found.stream = { text: "", usage: null };
for await (const chunk of await client.chat.completions.create({
  ...short,
  stream: true,
  stream_options: { include_usage: true },
})) {
  found.stream.text += chunk.choices[0]?.delta.content ?? "";
  found.stream.usage = chunk.usage ?? found.stream.usage;
}
const runner = client.chat.completions.stream(short);
found.runner = (await runner.finalChatCompletion()).choices[0].message.content;

const image = `data:image/png;base64,${readFileSync(picture).toString("base64")}`;
const parts = [
  { type: "image_url", image_url: { url: image } },
  { type: "text", text: messages[0].content },
];
const seen = await client.chat.completions.create({ ...short, messages: [{ role: "user", content: parts }] });
found.vision = { text: seen.choices[0].message.content, prompt: seen.usage.prompt_tokens };

const schema = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "blue"] }, count: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["colour", "count"],
  additionalProperties: false,
};
const parsed = await client.chat.completions.parse({
  ...short,
  max_completion_tokens: 64,
  response_format: { type: "json_schema", json_schema: { name: "scene", strict: true, schema } },
});
found.parsed = parsed.choices[0].message.parsed;
const response = await client.responses.parse({
  model: "bundled",
  input: "Describe it.",
  max_output_tokens: 64,
  text: { format: { type: "json_schema", name: "scene", strict: true, schema } },
});
found.response = response.output_parsed;
found.events = [];
for await (const event of await client.responses.create({ model: "bundled", input: "Hi", stream: true, max_output_tokens: 8 }))
  found.events.push(event.type);

const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", description: "Weather of a city", parameters } }];
const asked = [{ role: "user", content: "Weather in Oslo?" }];
const called = await client.chat.completions.create({
  model: "bundled-causal",
  messages: asked,
  tools,
  tool_choice: "required",
  parallel_tool_calls: false,
  max_completion_tokens: 96,
});
const [call] = called.choices[0].message.tool_calls;
found.call = { name: call.function.name, arguments: JSON.parse(call.function.arguments), reason: called.choices[0].finish_reason };
const told = await client.chat.completions.create({
  model: "bundled-causal",
  messages: [...asked, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "Rain, 7 degrees" }],
  tools,
  tool_choice: "none",
  max_completion_tokens: 16,
});
found.told = told.choices[0].message.content;

try {
  await client.chat.completions.create({ ...short, temperature: -1 });
} catch (error) {
  found.error = { name: error.constructor.name, status: error.status, param: error.param, label: error.requestID };
}

// an answer without an end, of which one chunk is read; the Python side waits until the server has dropped it
const endless = { ...short, max_completion_tokens: 512, ignore_eos: true, mmserve: { diffusion: { steps: 512, noCache: {}, lowConfidence: {} } } };
const stream = await client.chat.completions.create({ ...endless, stream: true });
for await (const _ of stream) break;
found.aborted = stream.controller.signal.aborted;

console.log(JSON.stringify(found));
