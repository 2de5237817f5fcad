// Messages as DOM nodes.

import { render } from "./markdown.js";

export function element(name, className, text) {
  const result = document.createElement(name);
  if (className) result.className = className;
  if (text !== undefined) result.textContent = text;
  return result;
}

function button(action, text, label) {
  const result = element("button", "", text);
  result.type = "button";
  result.dataset.action = action;
  if (label) result.setAttribute("aria-label", label);
  return result;
}

export function statistics(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.tokens) parts.push(`${stats.tokens} tokens`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats.first) parts.push(`first after ${(stats.first / 1000).toFixed(2)} s`);
  if (stats.prompt) parts.push(`${stats.prompt} in the prompt, ${stats.cached ?? 0} of them cached`);
  if (stats.end === "length") parts.push("cut off at the most tokens");
  if (stats.end === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

// A message with its parts: who, reasoning, body, calls, error, tools.
export function messageNode(message, index) {
  const root = element("article", `message ${message.role}`);
  root.dataset.index = String(index);
  root.append(element("div", "who", message.role === "user" ? "You" : message.model || "Model"));
  if (message.role === "assistant") {
    const reasoning = element("details", "reasoning");
    reasoning.append(element("summary", "", "Reasoning"), element("div", "", message.reasoning ?? ""));
    reasoning.hidden = !message.reasoning;
    root.append(reasoning);
  }
  const body = element("div", "body");
  if (message.role === "user") body.textContent = message.content;
  else body.append(...render(message.content));
  root.append(body);
  for (const call of message.calls ?? []) root.append(element("div", "call", `${call.name}(${call.arguments})`));
  if (message.error) root.append(element("div", "error", message.error));
  root.append(tools(message));
  return root;
}

export function tools(message) {
  const row = element("div", "tools");
  if (message.role === "user") row.append(button("edit", "Edit"));
  else row.append(button("retry", "Retry"));
  row.append(button("copy", "Copy"));
  if (message.role === "assistant") row.append(element("span", "stats", statistics(message.stats)));
  return row;
}

// The form in which a message is edited.
export function editor(message) {
  const root = element("form", "edit");
  const text = element("textarea");
  text.value = message.content;
  text.rows = Math.min(12, message.content.split("\n").length + 1);
  text.setAttribute("aria-label", "Edit the message");
  const send = button("send-edit", "Send");
  send.type = "submit";
  const row = element("div", "tools");
  row.append(send, button("cancel-edit", "Cancel"));
  root.append(text, row);
  return root;
}
