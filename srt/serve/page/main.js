// The chat page: state, and what the reader does.

import { ApiError, getFacts, streamChat } from "./api.js";
import { editor, element, messageNode, statistics } from "./messages.js";
import { loadChats, loadKey, loadSettings, saveChats, saveKey, saveSettings } from "./store.js";
import { StreamingMarkdown } from "./streaming.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const NEAR = 60; // pixels from the end within which the log follows an answer

const $ = (id) => document.getElementById(id);
const log = $("log");
const input = $("input");

const state = {
  chats: loadChats(),
  chat: null,
  settings: loadSettings(),
  key: loadKey(),
  facts: null,
  running: null, // an AbortController
};

// --- what is shown

function say(text) {
  $("status").textContent = text;
}

function isAtEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
}

function toEnd() {
  log.scrollTop = log.scrollHeight;
}

function showChats() {
  const items = state.chats.filter((chat) => chat.messages.length || chat === state.chat).map((chat) => {
    const open = element("button", "open", chat.title || "New chat");
    open.dataset.open = chat.id;
    if (chat === state.chat) open.setAttribute("aria-current", "true");
    const remove = element("button", "remove", "✕");
    remove.dataset.remove = chat.id;
    remove.setAttribute("aria-label", `Delete ${chat.title || "New chat"}`);
    const item = element("li");
    item.append(open, remove);
    return item;
  });
  $("chats").replaceChildren(...items);
}

function showLog() {
  const { messages } = state.chat;
  if (messages.length) log.replaceChildren(...messages.map(messageNode));
  else log.replaceChildren(element("p", "empty", "Ask something. Nothing leaves the machine that this page comes from."));
  toEnd();
}

function showRunning() {
  const isRunning = state.running !== null;
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  $("send").disabled = !input.value.trim();
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
  showRunning();
}

async function showFacts() {
  try {
    const facts = await getFacts(state.key);
    state.facts = facts;
    const threads = facts.threads === 1 ? "1 thread" : `${facts.threads} threads`;
    $("facts").textContent = `${facts.model} · ${facts.dtype} · ${facts.tier}, ${threads}`;
    $("facts").title = `${facts.model}: context of ${facts.context_length} tokens, cache of ${facts.kv_tokens}`;
  } catch (error) {
    state.facts = null;
    $("facts").textContent = error instanceof ApiError ? error.message : "the server cannot be reached";
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  $("settings").hidden = false;
  $("settings-button").setAttribute("aria-expanded", "true");
  $("set-key").focus();
  say("This server wants an API key.");
}

// --- conversations

function newChat() {
  stop();
  state.chat = { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), title: "", messages: [] };
  state.chats = [state.chat, ...state.chats.filter((chat) => chat.messages.length)];
  showChats();
  showLog();
  input.focus();
}

function openChat(id) {
  stop();
  state.chat = state.chats.find((chat) => chat.id === id) ?? state.chat;
  showChats();
  showLog();
  closeMenu();
}

function removeChat(id) {
  if (state.chat.id === id) stop();
  state.chats = state.chats.filter((chat) => chat.id !== id);
  saveChats(state.chats);
  if (state.chat.id === id) newChat();
  else showChats();
}

function exportChats() {
  const blob = new Blob([JSON.stringify(state.chats, null, 2)], { type: "application/json" });
  const anchor = element("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = "chats.json";
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

// --- answers

function requestBody() {
  const messages = state.chat.messages
    .filter((message) => !message.error || message.content)
    .map(({ role, content }) => ({ role, content }));
  const system = state.settings.system?.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const body = { messages };
  for (const name of NUMBERS) {
    const value = state.settings[name];
    if (value !== undefined && value !== "" && Number.isFinite(Number(value))) body[name] = Number(value);
  }
  return body;
}

function stop() {
  state.running?.abort();
}

function explainFailure(error) {
  if (!(error instanceof ApiError)) return `The server cannot be reached (${error.message}).`;
  return error.retryAfter ? `${error.message} (again in ${error.retryAfter} s)` : error.message;
}

async function answer() {
  if (state.running) return;
  const chat = state.chat;
  const body = requestBody();
  const message = { role: "assistant", content: "", model: state.facts?.model ?? "", stats: {} };
  chat.messages.push(message);
  const root = messageNode(message, chat.messages.length - 1);
  if (log.querySelector(".empty")) log.replaceChildren();
  log.append(root);
  toEnd();
  const view = new StreamingMarkdown(root.querySelector(".body"));
  const controller = new AbortController();
  state.running = controller;
  showRunning();
  say("The model reads …");
  const started = performance.now();
  try {
    for await (const chunk of streamChat(body, state.key, controller.signal)) take(chunk, message, root, view, started);
    say("Done.");
  } catch (error) {
    if (controller.signal.aborted) {
      message.stats.end = "stopped";
      say("Stopped.");
    } else {
      message.error = explainFailure(error);
      say(message.error);
      if (error.status === 401) askForKey();
    }
  }
  const follows = isAtEnd();
  view.finish();
  root.replaceWith(messageNode(message, chat.messages.indexOf(message)));
  if (state.chat === chat && follows) toEnd();
  if (state.running === controller) state.running = null;
  saveChats(state.chats);
  showRunning();
}

function take(chunk, message, root, view, started) {
  const { stats } = message;
  const follows = isAtEnd();
  const [choice] = chunk.choices ?? [];
  const delta = choice?.delta ?? {};
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    const now = performance.now();
    stats.first ??= now - started;
    stats.chunks = (stats.chunks ?? 0) + 1;
    stats.tokens = stats.chunks;
    if (stats.chunks > 1) stats.rate = ((stats.chunks - 1) * 1000) / (now - started - stats.first);
  }
  if (delta.content) {
    message.content += delta.content;
    view.append(delta.content);
  }
  if (delta.reasoning_content) {
    message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    const details = root.querySelector(".reasoning");
    details.hidden = false;
    details.lastChild.append(delta.reasoning_content);
  }
  for (const call of delta.tool_calls ?? []) {
    message.calls ??= [];
    message.calls[call.index] ??= { name: "", arguments: "" };
    message.calls[call.index].name += call.function?.name ?? "";
    message.calls[call.index].arguments += call.function?.arguments ?? "";
  }
  if (choice?.finish_reason) stats.end = choice.finish_reason;
  if (chunk.usage) {
    stats.prompt = chunk.usage.prompt_tokens;
    stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    stats.tokens = chunk.usage.completion_tokens;
    const decoding = performance.now() - started - (stats.first ?? 0);
    if (stats.tokens > 1 && decoding > 0) stats.rate = ((stats.tokens - 1) * 1000) / decoding;
  }
  const line = statistics(stats);
  root.querySelector(".stats").textContent = line;
  if (follows) requestAnimationFrame(toEnd);
}

function send(text) {
  const content = text.trim();
  if (!content || state.running) return;
  if (!state.chat.messages.length) state.chat.title = content.slice(0, 60);
  state.chat.messages.push({ role: "user", content });
  state.chats = [state.chat, ...state.chats.filter((chat) => chat !== state.chat)];
  saveChats(state.chats);
  showChats();
  showLog();
  answer();
}

// --- editing

function edit(index) {
  const root = log.querySelector(`[data-index="${index}"]`);
  if (!root || state.running) return;
  const form = editor(state.chat.messages[index]);
  root.replaceChildren(form);
  const text = form.querySelector("textarea");
  text.focus();
  text.setSelectionRange(text.value.length, text.value.length);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    resend(index, text.value);
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      resend(index, text.value);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      showLog();
      input.focus();
    }
  });
}

function resend(index, text) {
  if (!text.trim() || state.running) return;
  state.chat.messages.length = index;
  send(text);
  input.focus();
}

function retry(index) {
  if (state.running) return;
  state.chat.messages.length = index;
  showLog();
  answer();
}

async function copy(text, from) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure origin: the old way
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const label = from.textContent;
  from.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { from.textContent = label; }, 1200);
}

function lastUserMessage() {
  return state.chat.messages.map((message) => message.role).lastIndexOf("user");
}

// --- events

log.addEventListener("click", (event) => {
  const target = event.target.closest("button[data-action]");
  if (!target) return;
  const index = Number(target.closest(".message")?.dataset.index);
  const actions = {
    edit: () => edit(index),
    retry: () => retry(index),
    copy: () => copy(state.chat.messages[index].content, target),
    "copy-code": () => copy(target.closest(".code").querySelector("code").textContent, target),
    "cancel-edit": () => showLog(),
  };
  actions[target.dataset.action]?.();
});

$("chats").addEventListener("click", (event) => {
  const { open, remove } = event.target.closest("button")?.dataset ?? {};
  if (open) openChat(open);
  if (remove) removeChat(remove);
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.running) return;
  const text = input.value;
  input.value = "";
  grow();
  send(text);
});

input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !input.value && lastUserMessage() >= 0) {
    event.preventDefault();
    edit(lastUserMessage());
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (state.running) stop();
    else closeMenu();
  } else if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName)) {
    event.preventDefault();
    input.focus();
  }
});

$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", () => { closeMenu(); newChat(); });
$("export").addEventListener("click", exportChats);
$("delete-all").addEventListener("click", () => {
  if (!confirm("Delete all conversations?")) return;
  stop();
  state.chats = [];
  saveChats(state.chats);
  newChat();
});

function closeMenu() {
  $("sidebar").classList.remove("open");
  $("menu").setAttribute("aria-expanded", "false");
}

$("menu").addEventListener("click", () => {
  const isOpen = $("sidebar").classList.toggle("open");
  $("menu").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $("new-chat").focus();
});
$("main").addEventListener("click", (event) => {
  if (!event.target.closest("#menu")) closeMenu();
});

$("settings-button").addEventListener("click", () => {
  const isOpen = $("settings").hidden;
  $("settings").hidden = !isOpen;
  $("settings-button").setAttribute("aria-expanded", String(isOpen));
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
for (const name of ["system", ...NUMBERS]) {
  const field = $(`set-${name}`);
  field.value = state.settings[name] ?? "";
  field.addEventListener("change", () => {
    state.settings[name] = field.value;
    saveSettings(state.settings);
  });
}
$("set-key").value = state.key;
$("set-key").addEventListener("change", () => {
  state.key = $("set-key").value.trim();
  saveKey(state.key);
  say("");
  showFacts();
});

function applyTheme() {
  const { theme } = state.settings;
  if (theme) document.documentElement.dataset.theme = theme;
}
$("theme").addEventListener("click", () => {
  const isDark = state.settings.theme ? state.settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  state.settings.theme = isDark ? "light" : "dark";
  saveSettings(state.settings);
  applyTheme();
});

applyTheme();
newChat();
grow();
showFacts();
