// The server's API: server-sent events, errors, facts.

/** Collects server-sent events from text that may be cut anywhere. */
export class EventReader {
  constructor() {
    this.rest = "";
    this.data = [];
    this.afterReturn = false;
    this.begun = false;
  }

  /** The data of the events that `text` completes. */
  push(text) {
    const events = [];
    if (!this.begun && text) {
      this.begun = true;
      if (text.startsWith("\ufeff")) text = text.slice(1);
    }
    // A line feed after a carriage return that ended the last piece belongs to it.
    if (this.afterReturn && text.startsWith("\n")) text = text.slice(1);
    if (text) this.afterReturn = text.endsWith("\r");
    if (!/[\r\n]/.test(text)) {
      this.rest += text;
      return events;
    }
    const lines = (this.rest + text).split(/\r\n|\r|\n/);
    this.rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) events.push(this.data.join("\n"));
        this.data = [];
      } else if (line.startsWith("data:")) {
        this.data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

/** A refusal or a broken connection. `status` is 0 if there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function send(path, options) {
  try {
    return await fetch(new URL(path, document.baseURI), { cache: "no-store", credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(navigator.onLine ? "The server cannot be reached." : "This device is offline.");
  }
}

/** Seconds of a Retry-After header: a number or a date. */
export function retryAfter(value, now = Date.now()) {
  if (!value) return null;
  const seconds = /^\d+$/.test(value.trim()) ? Number(value) : (Date.parse(value) - now) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 500);
  try {
    const body = JSON.parse(text);
    const found = body?.error?.message ?? body?.error ?? body?.detail ?? body?.message;
    if (typeof found === "string") message = found;
  } catch { /* no JSON: a proxy's page */ }
  const seconds = retryAfter(response.headers.get("Retry-After"));
  return new ApiError(message || `The server answered ${response.status} ${response.statusText}.`, response.status, seconds);
}

/** What is served; null where it cannot be known. */
export async function fetchFacts(key) {
  const response = await send("version", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Yields the chunks of an answer. Throws ApiError, or AbortError after `signal`. */
export async function* streamChat(body, key, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const stream = response.body.getReader();
  const decoder = new TextDecoder();
  const events = new EventReader();
  try {
    for (;;) {
      const { done, value } = await stream.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection broke before the answer was complete.");
      });
      if (done) break;
      for (const data of events.push(decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        let chunk;
        try {
          chunk = JSON.parse(data);
        } catch {
          throw new ApiError("The server sent an event that is not JSON.");
        }
        if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error), chunk.error.status ?? 500);
        yield chunk;
      }
    }
  } finally {
    stream.cancel().catch(() => {});
  }
  throw new ApiError("The connection ended before the answer was complete.");
}
