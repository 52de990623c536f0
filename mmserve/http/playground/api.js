// The server's HTTP APIs. The token, where there is one, is in this module's memory and nowhere else.
let token = "";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export function useToken(given) { token = given; }
export const hasToken = () => token !== "";

async function call(path, body, signal) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const how = body === undefined ? { headers, signal } : { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await fetch(path, { ...how, credentials: "omit" });
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  throw new Refused(response.status, found.error?.message ?? `${response.status} ${response.statusText}`);
}

export const about = async () => (await call("/playground/about.json")).json();
export const models = async () => (await (await call("/v1/models")).json()).data;
export const post = async (path, body, signal) => (await call(path, body, signal)).json();

/** The server-sent events of a chat completion: name ("draft", or empty) and data of each. */
export async function* chat(body, signal) {
  const response = await call("/v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      let name = "", data = "";
      for (const line of event.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Refused(0, found.error.message);
      yield { name, data: found };
    }
  }
}
