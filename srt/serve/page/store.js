// What this browser remembers: conversations and settings. The API key is kept for the tab only.

const MAX_CONVERSATIONS = 100;
const PREFIX = "srt.chat.";
const SETTINGS = "srt.settings";
const THEME = "srt.theme";
const KEY = "srt.key";

function read(storage, name) {
  try {
    return JSON.parse(storage().getItem(name));
  } catch {
    return null;
  }
}

function write(storage, name, value) {
  try {
    if (value === null) storage().removeItem(name);
    else storage().setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// Reading the property fails where storage is switched off.
const local = () => window.localStorage;
const session = () => window.sessionStorage;

export const loadSettings = () => read(local, SETTINGS) ?? {};
export const saveSettings = (settings) => write(local, SETTINGS, settings);
export const loadTheme = () => read(local, THEME) ?? "auto";
export const saveTheme = (theme) => write(local, THEME, theme);
export const loadKey = () => read(session, KEY) ?? "";
export const saveKey = (key) => write(session, KEY, key || null);

export function newConversation() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");
  return { id, title: "New chat", updated: Date.now(), messages: [] };
}

function isConversation(value) {
  return typeof value?.id === "string" && Array.isArray(value.messages)
    && value.messages.every((m) => typeof m?.content === "string" && (m.role === "user" || m.role === "assistant"));
}

/** All conversations, the newest first. */
export function loadConversations() {
  const found = [];
  try {
    for (let i = 0; i < localStorage.length; i++) {
      const name = localStorage.key(i);
      if (!name.startsWith(PREFIX)) continue;
      const value = read(local, name);
      if (isConversation(value)) found.push(value);
    }
  } catch { /* storage is switched off: nothing is remembered */ }
  return found.sort((a, b) => b.updated - a.updated);
}

/** Saves a conversation; the oldest others make room. Returns whether it is saved. */
export function saveConversation(conversation) {
  const others = loadConversations().filter((c) => c.id !== conversation.id);
  while (others.length >= MAX_CONVERSATIONS) deleteConversation(others.pop().id);
  while (!write(local, PREFIX + conversation.id, conversation)) {
    if (!others.length) return false;
    deleteConversation(others.pop().id);
  }
  return true;
}

export function deleteConversation(id) {
  write(local, PREFIX + id, null);
}

/** A conversation as a document. */
export function toMarkdown(conversation) {
  const parts = conversation.messages.map((m) => {
    const calls = (m.toolCalls ?? []).map((c) => `\n\n    ${c.name}(${c.arguments})`).join("");
    return `## ${m.role === "user" ? "You" : "Assistant"}\n\n${m.content}${calls}`;
  });
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}
