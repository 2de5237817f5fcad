// The panels for settings and the API key, and the colours.
import { byId, h } from "./dom.js";
import { loadKey, loadSettings, loadTheme, saveKey, saveSettings, saveTheme } from "./store.js";

const FIELDS = [
  ["temperature", "Temperature", 0, 2, "any"],
  ["top_p", "Top p", 0, 1, "any"],
  ["top_k", "Top k", -1, null, 1],
  ["min_p", "Min p", 0, 1, "any"],
  ["max_tokens", "Most tokens", 1, null, 1],
  ["seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1],
  ["repetition_penalty", "Repetition penalty", 0, 2, "any"],
];

export let settings = loadSettings();

export function setUpSettings(onKey) {
  const dialog = byId("settings");
  for (const [name, label, min, max, step] of FIELDS) {
    const input = h("input", { type: "number", id: `set-${name}`, placeholder: "server's", step: String(step), inputMode: "decimal" });
    input.min = String(min);
    if (max !== null) input.max = String(max);
    byId("sampling").append(h("label", {}, label, input));
  }
  const show = () => {
    byId("set-system").value = settings.system ?? "";
    byId("set-key").value = loadKey();
    for (const [name] of FIELDS) byId(`set-${name}`).value = settings[name] ?? "";
  };
  // Each change is kept at once; a value out of range is marked by the browser and not used.
  dialog.addEventListener("input", () => {
    const next = { system: byId("set-system").value };
    for (const [name] of FIELDS) {
      const input = byId(`set-${name}`);
      if (input.value !== "" && input.checkValidity()) next[name] = input.valueAsNumber;
    }
    settings = next;
    saveSettings(settings);
  });
  byId("set-key").addEventListener("change", (event) => { saveKey(event.target.value.trim()); onKey(); });
  byId("settings-button").addEventListener("click", () => { show(); dialog.showModal(); });
  byId("close-settings").addEventListener("click", () => dialog.close());
  byId("reset-settings").addEventListener("click", () => { settings = {}; saveSettings(settings); show(); });
}

let asking = null;

/** Asks for an API key; resolves to whether one was given. Asks once, however many want to know. */
export function askKey(message) {
  asking ??= ask(message).finally(() => { asking = null; });
  return asking;
}

function ask(message) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-message").textContent = message;
  input.value = "";
  return new Promise((resolve) => {
    const listeners = new AbortController();
    const end = (isGiven) => {
      if (isGiven) saveKey(input.value.trim());
      listeners.abort();
      dialog.close();
      resolve(isGiven);
    };
    const { signal } = listeners;
    byId("key-use").addEventListener("click", () => end(input.value.trim() !== ""), { signal });
    byId("key-cancel").addEventListener("click", () => end(false), { signal });
    dialog.addEventListener("cancel", () => end(false), { signal });
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") end(input.value.trim() !== ""); }, { signal });
    if (!dialog.open) dialog.showModal();
    input.focus();
  });
}

export function setUpTheme() {
  const names = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
  const order = Object.keys(names);
  let theme = order.includes(loadTheme()) ? loadTheme() : "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = names[theme][0];
    byId("theme").setAttribute("aria-label", `Colours: ${names[theme][1]}`);
  };
  byId("theme").addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    saveTheme(theme);
    show();
  });
  show();
}
