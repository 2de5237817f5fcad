// Renders an answer that grows: what is complete is rendered once, only its end again.
import { closesFence, codeBlock, isFence, isHeading, isItem, renderMarkdown } from "./markdown.js";
import { highlight } from "./highlight.js";
import { visible } from "./inline.js";

/** How much of the text no further text can change; 0 for nothing. */
export function stableEnd(text) {
  let fence = null;
  let isList = false;
  let blank = false;
  let at = 0;
  let end = 0;
  let first = true;
  while (at < text.length) {
    const stop = text.indexOf("\n", at);
    const isWhole = stop >= 0;
    const line = text.slice(at, isWhole ? stop : text.length);
    const mark = isFence(line);
    if (fence) {
      if (closesFence(line, fence)) fence = null;
    } else {
      // A line at the margin begins a block after a blank line, and so do headings and fences.
      const isAtMargin = line !== "" && line[0] !== " " && line[0] !== "\t";
      const begins = blank || (isWhole && (isHeading(line) || mark !== null));
      if (!first && isAtMargin && begins && (!isList || (isWhole && !isItem(line)))) end = at;
      if (mark && isWhole) fence = mark[2];
      // A list also begins below a heading or a paragraph.
      isList = isItem(line) || (isList && (end !== at || first));
      if (mark && isAtMargin && isWhole) return end;
    }
    blank = line.trim() === "";
    first = false;
    if (!isWhole) break;
    at = stop + 1;
  }
  return end;
}

/** Shows markdown that is appended to, in an element of its own. */
export class StreamView {
  constructor(element) {
    this.element = element;
    this.pending = "";
    this.tail = [];
    this.code = null;
    this.frame = 0;
    this.timer = 0;
    this.pause = 0;
    this.onRender = () => {};
  }

  append(text) {
    this.pending += text.replace(/\r/g, "");
    if (this.frame || this.timer) return;
    // A long end costs more to render: then it is rendered less often.
    const draw = () => { this.timer = 0; this.frame = requestAnimationFrame(() => this.draw()); };
    if (this.pause > 8) this.timer = setTimeout(draw, this.pause);
    else draw();
  }

  draw() {
    this.frame = 0;
    const begin = performance.now();
    this.render(false);
    this.pause = (performance.now() - begin) * 4;
    this.onRender();
  }

  /** Renders what is left, however it ends. */
  finish() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.frame = this.timer = 0;
    this.render(true);
    this.onRender();
  }

  render(isEnd) {
    for (const node of this.tail) node.remove();
    this.tail = [];
    for (;;) {
      if (this.code) {
        if (!this.drawCode(isEnd)) return;
        continue;
      }
      const end = stableEnd(this.pending);
      if (end > 0) {
        this.element.append(...renderMarkdown(this.pending.slice(0, end)));
        this.pending = this.pending.slice(end);
        continue;
      }
      const stop = this.pending.indexOf("\n");
      const mark = stop >= 0 ? isFence(this.pending.slice(0, stop)) : null;
      if (mark && mark[1] === "") {
        this.openCode(mark);
        this.pending = this.pending.slice(stop + 1);
        continue;
      }
      this.tail = renderMarkdown(this.pending);
      this.element.append(...this.tail);
      if (isEnd) this.pending = "";
      return;
    }
  }

  openCode(mark) {
    const lines = [];
    const { element, code, language } = codeBlock(mark[3], () => lines.join("\n"));
    const last = document.createTextNode("");
    code.append(last);
    this.code = { fence: mark[2], lines, code, language, last };
    this.element.append(element);
  }

  /** Adds the lines that have come; returns whether the code is complete. */
  drawCode(isEnd) {
    const open = this.code;
    const lines = this.pending.split("\n");
    const rest = lines.pop();
    let i = 0;
    let isClosed = false;
    for (; i < lines.length && !isClosed; i++) {
      isClosed = closesFence(lines[i], open.fence);
      if (!isClosed) open.lines.push(lines[i]);
    }
    const shown = lines.slice(0, isClosed ? i - 1 : i);
    if (shown.length) open.last.before(`${visible(shown.join("\n"))}\n`);
    this.pending = isClosed ? [...lines.slice(i), rest].join("\n") : rest;
    if (!isClosed && isEnd) {
      if (!closesFence(rest, open.fence) && rest) open.lines.push(rest);
      this.pending = "";
      isClosed = true;
    }
    if (isClosed) {
      open.code.replaceChildren(...highlight(open.lines.join("\n"), open.language));
      this.code = null;
      return true;
    }
    // The end of the fence is not shown while it comes.
    open.last.data = /^ {0,3}[`~]+ *$/.test(rest) ? "" : visible(rest);
    return false;
  }
}
