// Blocks of markdown as DOM nodes. Nothing here makes nodes of HTML: what looks like a tag is text.
import { copyText, h } from "./dom.js";
import { highlight } from "./highlight.js";
import { renderInline } from "./inline.js";

const MAX_DEPTH = 12;
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})\s*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(?=\S)|[ \t]*$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** A heading's text without the marks that may close it. */
function headingText(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (end > 0 && trimmed[end - 1] === "#") end--;
  return end === 0 || /\s/.test(trimmed[end - 1]) ? trimmed.slice(0, end) : trimmed;
}

export const isFence = (line) => FENCE.exec(line);
export const isItem = (line) => ITEM.test(line);
export const isHeading = (line) => HEADING.test(line);

/** Whether a line closes a fence whose marks are `fence`. */
export function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length) && !/^ {4}/.test(line);
}

/** A block of code with its name and a button that copies it; `read` gives what is copied. */
export function codeBlock(info, read) {
  const language = /^[\w+#.-]*/.exec(info.trim())[0].toLowerCase();
  const code = h("code", { dir: "ltr" });
  const copy = h("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", () => copyText(read(), copy));
  const element = h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language || "text"), copy),
    h("pre", { tabIndex: 0 }, code));
  return { element, code, language };
}

function finishedCode(info, text) {
  const { element, code, language } = codeBlock(info, () => text);
  code.append(...highlight(text, language));
  return element;
}

/** The cells of a table's row; a bar after a backslash or within code is text. */
function cells(line) {
  const found = [];
  let cell = "";
  let inCode = false;
  const row = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  for (let i = 0; i < row.length; i++) {
    const c = row[i];
    if (c === "\\" && row[i + 1] === "|") { cell += "|"; i++; continue; }
    if (c === "`") inCode = !inCode && row.includes("`", i + 1);
    if (c === "|" && !inCode) { found.push(cell.trim()); cell = ""; } else cell += c;
  }
  found.push(cell.trim());
  return found;
}

function table(lines) {
  const sides = cells(lines[1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, tag) => {
    const found = cells(line);
    return h("tr", {}, ...sides.map((side, i) => h(tag, { class: side, dir: "auto" }, ...renderInline(found[i] ?? ""))));
  };
  const body = lines.slice(2).map((line) => row(line, "td"));
  return h("div", { class: "table", tabIndex: 0 }, h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, ...body)));
}

function startsTable(lines, i) {
  return lines[i].includes("|") && i + 1 < lines.length && DIVIDER.test(lines[i + 1]) && lines[i + 1].includes("-")
    && cells(lines[i]).length === cells(lines[i + 1]).length;
}

/** Reads a list that begins at a line; returns its element and the line after it. */
function list(lines, first, depth) {
  const [, indent, marker] = ITEM.exec(lines[first]);
  const ordered = /\d/.test(marker);
  const kind = marker.at(-1);
  const element = h(ordered ? "ol" : "ul");
  if (ordered && Number.parseInt(marker, 10) !== 1) element.start = Number.parseInt(marker, 10);
  let i = first;
  while (i < lines.length) {
    const match = ITEM.exec(lines[i]);
    if (!match || match[2].at(-1) !== kind || match[1].length > indent.length + 3 || match[1].length < indent.length || RULE.test(lines[i])) break;
    const width = Math.min(match[0].length, match[1].length + match[2].length + 4);
    const content = [lines[i].slice(width)];
    let isLoose = false;
    let fence = null;
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      const deep = /^ */.exec(line)[0].length;
      if (line.trim() === "") {
        content.push("");
        continue;
      }
      // Models indent nested items by two spaces also where three would be due.
      const isInside = deep >= width || (deep > match[1].length && (deep >= match[1].length + 2));
      const after = content.at(-1) === "";
      if (!isInside && (after || ITEM.test(line) || FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line))) break;
      if (after && !fence) isLoose = true;
      content.push(line.slice(Math.min(deep, width)));
      const mark = FENCE.exec(content.at(-1));
      if (fence ? closesFence(content.at(-1), fence) : mark) fence = fence ? null : mark[2];
    }
    while (content.length > 1 && content.at(-1) === "") content.pop();
    const item = h("li", { dir: "auto" });
    const task = /^\[([ xX])\][ \t]+/.exec(content[0]);
    if (task) {
      content[0] = content[0].slice(task[0].length);
      item.className = "task";
      item.append(h("span", { role: "img", "aria-label": task[1] === " " ? "open" : "done" }, task[1] === " " ? "☐ " : "☑ "));
    }
    item.append(...blocks(content, depth + 1, !isLoose));
    element.append(item);
  }
  return { element, next: i };
}

/** Nodes of lines. `isTight` leaves paragraphs without an element of their own, as in lists. */
function blocks(lines, depth, isTight = false) {
  const nodes = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (line.trim() === "") { i++; continue; }
    const fence = FENCE.exec(line);
    if (fence) {
      const content = [];
      for (i++; i < lines.length && !closesFence(lines[i], fence[2]); i++) content.push(lines[i].slice(0, fence[1].length).trim() ? lines[i] : lines[i].slice(fence[1].length));
      // The last line's end is no line.
      if (i === lines.length && content.at(-1) === "") content.pop();
      i++;
      nodes.push(finishedCode(fence[3], content.join("\n")));
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      // The page's own title is the first level.
      nodes.push(h(`h${Math.min(6, heading[1].length + 1)}`, { dir: "auto" }, ...renderInline(headingText(heading[2] ?? ""))));
      i++;
      continue;
    }
    if (RULE.test(line)) { nodes.push(h("hr")); i++; continue; }
    if (depth < MAX_DEPTH && QUOTE.test(line)) {
      const content = [];
      for (; i < lines.length && QUOTE.test(lines[i]); i++) content.push(lines[i].replace(QUOTE, ""));
      nodes.push(h("blockquote", { dir: "auto" }, ...blocks(content, depth + 1)));
      continue;
    }
    if (depth < MAX_DEPTH && ITEM.test(line)) {
      const { element, next } = list(lines, i, depth);
      nodes.push(element);
      i = next;
      continue;
    }
    if (startsTable(lines, i)) {
      const first = i;
      for (i += 2; i < lines.length && lines[i].trim() && lines[i].includes("|");) i++;
      nodes.push(table(lines.slice(first, i)));
      continue;
    }
    const content = [line.trimStart()];
    for (i++; i < lines.length; i++) {
      const next = lines[i];
      if (next.trim() === "" || FENCE.test(next) || HEADING.test(next) || RULE.test(next) || startsTable(lines, i)) break;
      if (depth < MAX_DEPTH && (QUOTE.test(next) || (ITEM.test(next) && !/^ *\d*[2-9]\d*[.)]/.test(next)))) break;
      content.push(next.trimStart());
    }
    const inline = renderInline(content.join("\n").trimEnd());
    if (isTight) nodes.push(...inline);
    else nodes.push(h("p", { dir: "auto" }, ...inline));
  }
  return nodes;
}

/** DOM nodes of a text in markdown. */
export function renderMarkdown(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}
