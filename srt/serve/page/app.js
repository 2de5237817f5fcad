// The page: which conversation is shown, what is asked, keys.
import { answer, requestBody } from "./answering.js";
import { fetchFacts } from "./api.js";
import { byId, download, h } from "./dom.js";
import { setUpScrolling } from "./scrolling.js";
import { askKey, setUpSettings, setUpTheme, settings } from "./settings.js";
import * as store from "./store.js";
import { AssistantMessage, userMessage } from "./transcript.js";

const input = byId("input");
const transcript = byId("log");
const scrolling = setUpScrolling(byId("scroller"), transcript, byId("latest"));
let conversation = store.newConversation();
let running = null;
let lastUser = null;

const say = (text) => { byId("status").textContent = text; };

function save() {
  conversation.updated = Date.now();
  if (!store.saveConversation(conversation)) say("This browser does not keep this conversation.");
  showConversations();
}

function showConversations() {
  const items = store.loadConversations().map((c) => {
    const open = h("button", { type: "button", class: "open" }, c.title);
    if (c.id === conversation.id) open.setAttribute("aria-current", "page");
    open.addEventListener("click", () => { show(c); closeSidebar(); input.focus(); });
    const remove = h("button", { type: "button", class: "icon remove", "aria-label": `Delete ${c.title}` }, "✕");
    remove.addEventListener("click", () => {
      if (!confirm(`Delete “${c.title}”?`)) return;
      store.deleteConversation(c.id);
      if (c.id === conversation.id) show(store.newConversation());
      showConversations();
    });
    return h("div", { class: "entry" }, open, remove);
  });
  byId("chats").replaceChildren(...items);
  const isEmpty = conversation.messages.length === 0;
  byId("export-json").disabled = byId("export-markdown").disabled = isEmpty;
}

function show(other) {
  stop();
  conversation = other;
  draw();
  scrolling.toEnd();
}

function draw() {
  lastUser = null;
  const elements = conversation.messages.map((message, i) => {
    if (message.role === "user") {
      lastUser = userMessage(message, (text) => ask(text, i));
      return lastUser.element;
    }
    const view = new AssistantMessage(message, () => retry(i), () => {});
    view.showWhole();
    return view.element;
  });
  transcript.replaceChildren(...elements);
  byId("welcome").hidden = elements.length > 0;
  showConversations();
}

/** Asks with a text in place of the message at `at` and all that follow. */
function ask(text, at = conversation.messages.length) {
  stop();
  conversation.messages.length = at;
  if (at === 0) conversation.title = text.trim().split("\n")[0].slice(0, 60);
  conversation.messages.push({ role: "user", content: text });
  run();
}

/** Answers anew in place of the message at `at`. */
function retry(at) {
  stop();
  conversation.messages.length = at;
  run();
}

async function run() {
  const own = conversation;
  const body = requestBody(own.messages.filter((m) => m.content || m.role === "user"), settings);
  const message = { role: "assistant", content: "" };
  own.messages.push(message);
  draw();
  const at = own.messages.length - 1;
  const view = new AssistantMessage(message, () => retry(at), scrolling.follow);
  transcript.lastElementChild.replaceWith(view.element);
  view.begin();
  scrolling.toEnd();
  save();
  const controller = new AbortController();
  running = controller;
  setBusy(true);
  say("Answering");
  await answer(message, body, store.loadKey(), controller.signal, {
    change: (delta) => view.add(delta),
    waiting: (text, seconds) => { view.wait(text, seconds); say(`Waiting ${seconds} seconds`); },
  });
  view.finish();
  const isNewest = running === controller;
  if (isNewest) {
    running = null;
    setBusy(false);
    say(message.error ?? (message.finish === "stopped" ? "Stopped" : "Answer complete"));
    scrolling.follow();
  }
  // It may have been deleted, or continued elsewhere, while the answer came.
  if (own.messages[at] !== message) return;
  if (own === conversation || store.loadConversations().some((c) => c.id === own.id)) store.saveConversation(own);
  if (message.status === 401 && isNewest && (await askKey(message.error))) {
    loadFacts();
    if (own === conversation && !running) retry(at);
  }
}

function stop() {
  running?.abort();
  running = null;
  setBusy(false);
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  transcript.setAttribute("aria-busy", String(isBusy));
}

function send() {
  const text = input.value;
  if (!text.trim() || running) return;
  input.value = "";
  fitInput();
  ask(text);
}

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 220)}px`;
  byId("send").disabled = !input.value.trim();
}

async function loadFacts() {
  try {
    const facts = await fetchFacts(store.loadKey());
    byId("model").textContent = facts.model ?? "unknown model";
    const parts = [facts.dtype, facts.tier, facts.threads && (facts.threads === 1 ? "1 thread" : `${facts.threads} threads`),
      facts.context_length && `${facts.context_length.toLocaleString("en")} context`];
    byId("machine").textContent = parts.filter(Boolean).join(" · ");
    document.title = `${facts.model ?? "srt"} – chat`;
  } catch (error) {
    byId("model").textContent = error.status === 401 ? "API key needed" : "not reachable";
    byId("machine").textContent = error.message;
    if (error.status === 401 && (await askKey(error.message))) await loadFacts();
  }
}

function openSidebar() {
  document.body.classList.add("side-open");
  byId("scrim").hidden = false;
  byId("menu").setAttribute("aria-expanded", "true");
  byId("new-chat").focus();
}

function closeSidebar() {
  document.body.classList.remove("side-open");
  byId("scrim").hidden = true;
  byId("menu").setAttribute("aria-expanded", "false");
}

function newChat() {
  show(store.newConversation());
  closeSidebar();
  input.focus();
}

function exportAs(kind) {
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat";
  if (kind === "json") download(`${name}.json`, "application/json", JSON.stringify(conversation, null, 2));
  else download(`${name}.md`, "text/markdown", store.toMarkdown(conversation));
}

document.addEventListener("keydown", (event) => {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const isTyping = event.target.matches?.("input, textarea");
  if (event.key === "Escape") {
    if (document.body.classList.contains("side-open")) { closeSidebar(); byId("menu").focus(); }
    else if (running) stop();
  } else if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    input.focus();
  }
});
input.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && input.value === "" && lastUser) {
    event.preventDefault();
    lastUser.edit();
  }
});
input.addEventListener("input", fitInput);
byId("send").addEventListener("click", () => { send(); input.focus(); });
byId("stop").addEventListener("click", () => { stop(); input.focus(); });
byId("new-chat").addEventListener("click", newChat);
byId("menu").addEventListener("click", openSidebar);
byId("close-sidebar").addEventListener("click", closeSidebar);
byId("scrim").addEventListener("click", closeSidebar);
byId("export-json").addEventListener("click", () => exportAs("json"));
byId("export-markdown").addEventListener("click", () => exportAs("markdown"));
// Fields of keys stand in forms, as browsers want it; nothing is sent by one.
document.addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("storage", showConversations);
window.addEventListener("online", loadFacts);
setUpTheme();
setUpSettings(loadFacts);
draw();
fitInput();
loadFacts();
if (matchMedia("(hover: hover)").matches) input.focus();
