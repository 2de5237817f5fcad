// Markdown as DOM nodes. Text goes into text nodes and nothing else, so no HTML of a model runs, and
// nothing is fetched: images are shown as links. A subset that models write: headings, lists, tables,
// quotes, fenced code, emphasis, code, links.

import { colour } from "./code.js";

const MAX_DEPTH = 24; // of quotes and lists; what lies deeper is text
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;

function node(name, ...children) {
  const result = document.createElement(name);
  result.append(...children);
  return result;
}

// The blocks of a text as nodes.
export function render(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) {
      at += 1;
    } else if ((match = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/.exec(line))) {
      const end = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}[ \\t]*$`);
      let stop = at + 1;
      while (stop < lines.length && !end.test(lines[stop])) stop += 1;
      out.push(codeBlock(lines.slice(at + 1, stop).join("\n"), match[2]));
      at = stop + 1;
    } else if ((match = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*$/.exec(line))) {
      out.push(node(`h${match[1].length}`, ...inline(match[2])));
      at += 1;
    } else if (/^ {0,3}([-*_])[ \t]*(\1[ \t]*){2,}$/.test(line)) {
      out.push(node("hr"));
      at += 1;
    } else if (/^ {0,3}>/.test(line) && depth < MAX_DEPTH) {
      const stop = endOf(lines, at, (one) => /^ {0,3}>/.test(one));
      const inner = lines.slice(at, stop).map((one) => one.replace(/^ {0,3}> ?/, ""));
      out.push(node("blockquote", ...blocks(inner, depth + 1)));
      at = stop;
    } else if (item(line) && depth < MAX_DEPTH) {
      at = list(lines, at, depth, out);
    } else if (at + 1 < lines.length && line.includes("|") && isRule(lines[at + 1])) {
      const stop = endOf(lines, at + 2, (one) => one.includes("|"));
      out.push(table(lines.slice(at, stop)));
      at = stop;
    } else {
      const stop = endOf(lines, at + 1, (one) => one.trim() && !startsBlock(one, depth));
      out.push(node("p", ...inline(lines.slice(at, stop).join("\n"))));
      at = stop;
    }
  }
  return out;
}

function endOf(lines, from, belongs) {
  let stop = from;
  while (stop < lines.length && belongs(lines[stop])) stop += 1;
  return stop;
}

function startsBlock(line, depth) {
  return /^ {0,3}(`{3,}|~{3,}|#{1,6}[ \t])/.test(line)
    || (depth < MAX_DEPTH && (/^ {0,3}>/.test(line) || item(line) !== null));
}

function item(line) {
  return /^( *)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/.exec(line);
}

function list(lines, from, depth, out) {
  const first = item(lines[from]);
  const ordered = /\d/.test(first[2]);
  const result = node(ordered ? "ol" : "ul");
  if (ordered) result.start = parseInt(first[2], 10);
  let at = from;
  while (at < lines.length) {
    const match = item(lines[at]);
    if (!match || match[1].length > first[1].length + 1 || /\d/.test(match[2]) !== ordered
      || match[1].length < first[1].length) break;
    const inner = [lines[at].slice(match[0].length)];
    const indent = match[1].length + 2;
    at += 1;
    // Lines that are indented belong to the item, also after an empty one.
    while (at < lines.length) {
      const line = lines[at];
      const space = line.length - line.trimStart().length;
      const isBlank = !line.trim();
      if (isBlank && !(at + 1 < lines.length && /^ {2,}\S/.test(lines[at + 1])
        && lines[at + 1].search(/\S/) >= indent)) break;
      if (!isBlank && space < indent && (item(line) || startsBlock(line, depth))) break;
      if (!isBlank && space < indent && !lines[at - 1].trim()) break;
      inner.push(line.slice(Math.min(space, match[0].length)));
      at += 1;
    }
    result.append(node("li", ...tight(blocks(inner, depth + 1))));
    if (at < lines.length && !lines[at].trim()) {
      const next = item(lines[at + 1] ?? "");
      if (next && next[1].length === first[1].length) at += 1;
    }
  }
  out.push(result);
  return at;
}

// An item's only paragraph is its text.
function tight(children) {
  const [first, ...rest] = children;
  return first?.nodeName === "P" ? [...first.childNodes, ...rest] : children;
}

function isRule(line) {
  return line.includes("-") && /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/.test(line);
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function table(lines) {
  const head = cells(lines[0]);
  const row = (line, kind) => node("tr", ...head.map((_, i) => node(kind, ...inline(cells(line)[i] ?? ""))));
  const body = node("tbody", ...lines.slice(2).map((line) => row(line, "td")));
  const wrapper = node("div", node("table", node("thead", row(lines[0], "th")), body));
  wrapper.className = "table";
  return wrapper;
}

function codeBlock(text, language) {
  const code = node("code", ...colour(text, language));
  const name = node("span");
  name.textContent = language.slice(0, 30);
  const copy = node("button", "Copy");
  copy.type = "button";
  copy.dataset.action = "copy-code";
  const bar = node("div", name, copy);
  bar.className = "bar";
  const block = node("div", bar, node("pre", code));
  block.className = "code";
  return block;
}

const INLINE = new RegExp([
  "(?<escape>\\\\[!-/:-@\\[-`{-~])",
  "(?<code>(?<ticks>`+)(?!`)(?<inner>[^]*?[^`])\\k<ticks>(?!`))",
  "(?<image>!?)\\[(?<label>[^\\[\\]\\n]{0,500})\\]\\((?<target>[^()\\s]{1,2000})(?:[ \\t]+\"[^\"\\n]*\")?\\)",
  "<(?<auto>https?://[^\\s<>]{1,2000})>",
  "(?<url>\\bhttps?://[^\\s<>()\\[\\]\"'`]{1,2000}[^\\s<>()\\[\\]\"'`.,:;!?*_])",
  "(?<mark>\\*\\*|__|~~|(?<![A-Za-z0-9])_|\\*)(?=\\S)(?<strong>[^\\n]{1,2000}?)(?<=\\S)\\k<mark>(?![A-Za-z0-9_])",
].join("|"), "g");

const MARKS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };

function inline(text, depth = 0) {
  const out = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const groups = match.groups;
    if (match.index > end) out.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    if (groups.escape) {
      out.push(groups.escape[1]);
    } else if (groups.code) {
      out.push(node("code", groups.inner.replace(/\n/g, " ").replace(/^ (.*) $/, "$1")));
    } else if (groups.target !== undefined) {
      const label = groups.label || (groups.image ? "image" : groups.target);
      out.push(link(groups.target, groups.image ? [`🖼 ${label}`] : inline(label, depth + 1), match[0]));
    } else if (groups.auto || groups.url) {
      const target = groups.auto ?? groups.url;
      out.push(link(target, [target], match[0]));
    } else if (depth < 8) {
      out.push(node(MARKS[groups.mark], ...inline(groups.strong, depth + 1)));
    } else {
      out.push(match[0]);
    }
  }
  if (end < text.length) out.push(text.slice(end));
  return out;
}

// A link where its target is one that may be opened; else what was written.
function link(target, children, written) {
  if (!SAFE_LINK.test(target)) return written;
  const result = node("a", ...children);
  result.href = target;
  result.target = "_blank";
  result.rel = "noopener noreferrer nofollow";
  result.referrerPolicy = "no-referrer";
  return result;
}
