// Conversations and settings, in this browser only. The key is forgotten with the tab.

const CHATS = "srt.chats";
const SETTINGS = "srt.settings";
const KEY = "srt.key";
const MAX_CHATS = 100;
const MAX_CHARACTERS = 4_000_000; // browsers give an origin some five million

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function isChat(chat) {
  return chat && typeof chat.id === "string" && Array.isArray(chat.messages);
}

export function loadChats() {
  const chats = read(localStorage, CHATS, []);
  return Array.isArray(chats) ? chats.filter(isChat) : [];
}

// Saves the conversations, the newest first; the oldest go where there is no room for all.
export function saveChats(chats) {
  let kept = chats.filter((chat) => chat.messages.length).slice(0, MAX_CHATS);
  for (;;) {
    const text = JSON.stringify(kept);
    try {
      if (text.length > MAX_CHARACTERS) throw new Error("full");
      localStorage.setItem(CHATS, text);
      return;
    } catch {
      if (kept.length <= 1) return; // one that does not fit lives as long as the page
      kept = kept.slice(0, Math.ceil(kept.length / 2));
    }
  }
}

export function loadSettings() {
  const settings = read(localStorage, SETTINGS, {});
  return settings && typeof settings === "object" ? settings : {};
}

export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch { /* they hold while the page is open */ }
}

export function loadKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function saveKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch { /* it holds while the page is open */ }
}
