// The messages of a conversation as elements.
import { describeStats } from "./answering.js";
import { copyText, h } from "./dom.js";
import { visible } from "./inline.js";
import { renderMarkdown } from "./markdown.js";
import { StreamView } from "./stream.js";

const button = (label, action) => {
  const element = h("button", { type: "button", class: "quiet", "data-action": label.toLowerCase() }, label);
  element.addEventListener("click", () => action(element));
  return element;
};

/** A user's message. `edit` is told the new text. */
export function userMessage(message, onEdit) {
  const body = h("div", { class: "body", dir: "auto" }, visible(message.content));
  const tools = h("div", { class: "tools" });
  const element = h("article", { class: "message user", "aria-label": "You" }, body, tools);
  const edit = () => {
    const area = h("textarea", { class: "edit", value: message.content, "aria-label": "Edit the message" });
    const close = () => { area.replaceWith(body); tools.replaceChildren(...normal); };
    const send = () => { if (area.value.trim()) onEdit(area.value); };
    area.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") { event.stopPropagation(); close(); normal[0].focus(); }
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
    });
    body.replaceWith(area);
    tools.replaceChildren(button("Cancel", close), button("Send", send));
    area.style.height = `${Math.min(400, area.scrollHeight + 4)}px`;
    area.focus();
  };
  const normal = [button("Edit", edit), button("Copy", (b) => copyText(message.content, b))];
  tools.append(...normal);
  return { element, edit };
}

/** An assistant's message, also while it comes. */
export class AssistantMessage {
  constructor(message, onRetry, onRender) {
    this.message = message;
    this.onRetry = onRetry;
    this.reasoningText = h("div", { class: "reasoning-text", dir: "auto" });
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), this.reasoningText);
    this.body = h("div", { class: "body markdown", dir: "auto" });
    this.calls = h("div", { class: "calls" });
    this.note = h("div", { class: "note" });
    this.stats = h("span", { class: "stats" });
    this.tools = h("div", { class: "tools" }, this.stats);
    this.element = h("article", { class: "message assistant", "aria-label": "Assistant" },
      this.reasoning, this.body, this.calls, this.note, this.tools);
    this.view = new StreamView(this.body);
    this.view.onRender = () => { this.showStats(); onRender(); };
    this.reasoningView = new StreamView(this.reasoningText);
    this.reasoningView.onRender = onRender;
  }

  /** Shows one that is complete. */
  showWhole() {
    this.body.append(...renderMarkdown(this.message.content));
    if (this.message.reasoning) {
      this.reasoning.hidden = false;
      this.reasoningText.append(...renderMarkdown(this.message.reasoning));
    }
    this.finish();
  }

  begin() {
    this.element.classList.add("busy");
    this.note.textContent = "";
  }

  add({ content, reasoning }) {
    this.note.textContent = "";
    if (reasoning) {
      this.reasoning.hidden = false;
      this.reasoningView.append(reasoning);
    }
    this.view.append(content);
    if (this.message.toolCalls) this.showCalls();
  }

  wait(text, seconds) {
    this.note.textContent = `${visible(text)} Trying again in ${seconds} s.`;
  }

  showCalls() {
    this.calls.replaceChildren(...this.message.toolCalls.map((call) =>
      h("div", { class: "call" }, h("strong", {}, `Calls ${visible(call.name)}`), h("pre", { tabIndex: 0 }, visible(call.arguments)))));
  }

  showStats() {
    this.stats.textContent = describeStats(this.message);
  }

  finish() {
    this.view.finish();
    this.reasoningView.finish();
    this.element.classList.remove("busy");
    this.showStats();
    if (this.message.toolCalls) this.showCalls();
    this.note.textContent = "";
    if (this.message.error) this.note.append(h("p", { class: "error", role: "alert" }, visible(this.message.error)));
    this.tools.replaceChildren(button("Copy", (b) => copyText(this.message.content, b)), button("Retry", this.onRetry), this.stats);
  }
}
