// The server's API: what answers, and answers as they come.

// An error that the server explains.
export class ApiError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers(key) {
  const result = { "Content-Type": "application/json" };
  if (key) result.Authorization = `Bearer ${key}`;
  return result;
}

async function explain(response) {
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch { /* not JSON: the status has to do */ }
  const seconds = Number(response.headers.get("Retry-After"));
  return new ApiError(message, response.status, Number.isFinite(seconds) && seconds > 0 ? seconds : null);
}

// Model, tier and so on; see /version in docs/serving.md.
export async function getFacts(key) {
  const response = await fetch("version", { headers: headers(key) });
  if (!response.ok) throw await explain(response);
  return response.json();
}

// Splits a stream of bytes into the data of server-sent events, wherever it is cut.
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
      const events = rest.split(/\r?\n\r?\n/);
      rest = done ? "" : events.pop();
      for (const event of events) {
        const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chunks of an answer to a conversation.
export async function* streamChat(body, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await explain(response);
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 200, null);
    yield chunk;
  }
  throw new ApiError("the connection ended before the answer did", 0, null);
}
