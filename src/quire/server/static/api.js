// Calls the server that the page came from. The key is kept in this module's memory alone.

let key = "";

export function setKey(text) { key = text.trim(); }
export const hasKey = () => key !== "";

/** An answer that is an error, with the server's sentence and its status. */
export class CallError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(hasBody) {
  const found = hasBody ? { "Content-Type": "application/json" } : {};
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

async function call(path, body, signal) {
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(body !== undefined),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal, cache: "no-store", credentials: "omit",
  });
  if (answer.ok) return answer;
  let message = `status ${answer.status}`;
  try { message = (await answer.json()).error.message; } catch { /* the answer is no JSON */ }
  throw new CallError(message, answer.status);
}

/** The JSON that answers a call. Without a body it is a GET. Throws CallError. */
export async function ask(path, body, signal) {
  return (await call(path, body, signal)).json();
}

/** Yields the data of server-sent events, as parsed JSON, up to [DONE]. Throws CallError. */
export async function* stream(path, body, signal) {
  const answer = await call(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const found = JSON.parse(data);
      if (found.error) throw new CallError(found.error.message, 500);
      yield found;
    }
  }
}
