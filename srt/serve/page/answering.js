// One answer: asks the server, collects what comes, measures.
import { ApiError, streamChat } from "./api.js";

const MAX_WAITS = 5;
const MAX_WAIT_SECONDS = 60;

/** The request for the next message of a conversation. */
export function requestBody(messages, settings) {
  const body = { messages: [] };
  if (settings.system?.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const { role, content } of messages) body.messages.push({ role, content });
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty"]) {
    if (typeof settings[name] === "number" && Number.isFinite(settings[name])) body[name] = settings[name];
  }
  return body;
}

function wait(seconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => { clearTimeout(timer); reject(new DOMException("stopped", "AbortError")); };
    const timer = setTimeout(() => { signal.removeEventListener("abort", stop); resolve(); }, seconds * 1000);
    signal.addEventListener("abort", stop, { once: true });
  });
}

/**
 * Fills `message` (content, reasoning, toolCalls, stats, error, finish).
 * `on` has change({content, reasoning}) for text that came, and waiting(message, seconds).
 */
export async function answer(message, body, key, signal, on) {
  for (let waits = 0; ; waits++) {
    try {
      await read(message, body, key, signal, on);
      return;
    } catch (error) {
      if (error.name === "AbortError") {
        message.finish = "stopped";
        return;
      }
      const isBusy = error instanceof ApiError && (error.status === 429 || error.status === 503);
      const seconds = error.retryAfter;
      if (!isBusy || seconds === null || seconds > MAX_WAIT_SECONDS || waits >= MAX_WAITS) {
        message.error = error.message;
        message.status = error.status ?? 0;
        return;
      }
      on.waiting(error.message, seconds);
      try {
        await wait(seconds, signal);
      } catch {
        message.finish = "stopped";
        return;
      }
    }
  }
}

async function read(message, body, key, signal, on) {
  const begin = performance.now();
  let first = 0;
  let last = 0;
  let chunks = 0;
  const measure = (usage) => {
    const seconds = (last - first) / 1000;
    const tokens = usage?.completion_tokens ?? chunks;
    message.stats = {
      tokens, isExact: Boolean(usage), prompt: usage?.prompt_tokens ?? null,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
      first: first ? first - begin : null, rate: seconds > 0 && tokens > 1 ? (tokens - 1) / seconds : null,
    };
  };
  for await (const chunk of streamChat(body, key, signal)) {
    const choice = chunk.choices?.[0];
    if (choice) {
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
      if (content || reasoning || calls) {
        last = performance.now();
        first ||= last;
        chunks++;
        measure(null);
      }
      if (typeof content === "string") message.content += content;
      if (typeof reasoning === "string") message.reasoning = (message.reasoning ?? "") + reasoning;
      if (Array.isArray(calls)) addCalls(message, calls);
      if (choice.finish_reason) message.finish = choice.finish_reason;
      on.change({ content: content ?? "", reasoning: reasoning ?? "" });
    }
    if (chunk.usage) {
      measure(chunk.usage);
      on.change({ content: "", reasoning: "" });
    }
  }
}

function addCalls(message, deltas) {
  message.toolCalls ??= [];
  for (const delta of deltas) {
    let call = message.toolCalls.find((c) => c.index === delta.index);
    if (!call) message.toolCalls.push(call = { index: delta.index, name: "", arguments: "" });
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }
}

/** Facts of an answer in a line. */
export function describeStats(message) {
  const parts = [];
  const s = message.stats;
  if (s) {
    if (s.rate) parts.push(`${s.rate.toFixed(1)} tokens/s`);
    if (s.first !== null) parts.push(`first token ${s.first < 1000 ? `${Math.round(s.first)} ms` : `${(s.first / 1000).toFixed(1)} s`}`);
    parts.push(`${s.isExact ? "" : "≈ "}${s.tokens} tokens`);
    if (s.prompt !== null) parts.push(`prompt ${s.prompt}${s.cached ? ` (${s.cached} cached)` : ""}`);
  }
  if (message.finish === "length") parts.push("ended at the token limit");
  if (message.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}
