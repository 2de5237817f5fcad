// A text that grows, as markdown. What is complete is rendered once; each animation frame renders only the
// part after the last blank line, so that a long answer costs no more at its end than at its beginning.

import { render } from "./markdown.js";

export class StreamingMarkdown {
  constructor(container) {
    this.container = container;
    this.text = "";
    this.settled = 0; // characters that are rendered for good
    this.tail = []; // nodes of those that are not
    this.frame = 0;
    this.fence = null; // what closes the code that is open at `settled`
  }

  append(text) {
    this.text += text;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const end = this.boundary();
    for (const one of this.tail) one.remove();
    if (end > this.settled) {
      this.container.append(...render(this.text.slice(this.settled, end)));
      this.settled = end;
    }
    this.tail = render(this.text.slice(this.settled));
    this.container.append(...this.tail);
  }

  // Where the last paragraph begins that is certain to be a new block: after a blank line, outside of code, and
  // not within a list, which goes on over blank lines.
  boundary() {
    let found = this.settled;
    let fence = null;
    let at = this.settled;
    let wasBlank = false;
    while (at < this.text.length) {
      const stop = this.text.indexOf("\n", at);
      if (stop < 0) break;
      const line = this.text.slice(at, stop);
      const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line);
      if (mark && !fence) fence = mark[1];
      else if (mark && mark[1][0] === fence?.[0] && mark[1].length >= fence.length && !line.slice(mark[0].length).trim()) fence = null;
      if (!fence && wasBlank && line.trim() && !/^\s|^([-*+]|\d{1,9}[.)])[ \t]/.test(line) && !mark) found = at;
      wasBlank = !line.trim() && !fence;
      at = stop + 1;
    }
    return found;
  }

  // The whole text once more: a list that was rendered in parts is one.
  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.container.replaceChildren(...render(this.text));
  }
}
