// Markdown within a line or paragraph, as DOM nodes made of text.
import { h } from "./dom.js";

const MAX_DEPTH = 8;
// How far a mark's partner is looked for: it bounds the work on hostile texts.
const REACH = 1000;
const SPECIAL = /[\\`*_~![<\n]|https?:\/\//g;
const SAFE = /^(https?:\/\/|mailto:)/i;

/** The text with characters that hide or reorder others made visible. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e]/g, (c) =>
    c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : `[U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

/** A link that the reader may follow, or null if the address is of another kind. */
function link(address, children, title = "") {
  if (!SAFE.test(address) || /[\u0000-\u0020]/.test(address) || !URL.canParse(address)) return null;
  const properties = { href: address, rel: "noopener noreferrer", target: "_blank", referrerPolicy: "no-referrer" };
  if (title) properties.title = visible(title);
  return h("a", properties, ...children);
}

/** Where `[label](target)` ends and what it says; null if it is none. */
function readLink(text, at) {
  const limit = Math.min(text.length, at + REACH);
  let depth = 0;
  let close = at;
  for (; close < limit; close++) {
    const c = text[close];
    if (c === "\\") close++;
    else if (c === "[") depth++;
    else if (c === "]" && --depth === 0) break;
  }
  if (close >= limit || text[close + 1] !== "(") return null;
  const target = /^\(\s*(<[^<>\n]{0,2000}>|[^\s()<>]{0,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})*)(?:\s+(?:"([^"\n]{0,500})"|'([^'\n]{0,500})'))?\s*\)/.exec(text.slice(close + 1, close + 4000));
  if (!target) return null;
  return {
    label: text.slice(at + 1, close),
    address: target[1].replace(/^<|>$/g, "").replace(/\\([!-/:-@[-`{-~])/g, "$1"),
    title: target[2] ?? target[3] ?? "",
    end: close + 1 + target[0].length,
  };
}

const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);
const isSpace = (c) => c === undefined || /\s/.test(c);

/** Where the partner of an opening mark is, or -1. */
function closing(text, from, mark) {
  const limit = Math.min(text.length, from + REACH);
  const c = mark[0];
  for (let i = from; i < limit; i++) {
    if (text[i] === "\\") { i++; continue; }
    if (text[i] === "`") {
      const end = text.indexOf("`", i + 1);
      if (end > 0 && end < limit) i = end;
      continue;
    }
    if (text[i] !== c) continue;
    let run = 1;
    while (text[i + run] === c) run++;
    const fits = run === mark.length || (run > 2 && mark.length < run);
    if (fits && i > from && !isSpace(text[i - 1]) && !(c === "_" && isWord(text[i + run]))) return i + run - mark.length;
    i += run - 1;
  }
  return -1;
}

/** DOM nodes of a text. */
export function renderInline(text, depth = 0, inLink = false) {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(visible(plain)));
    plain = "";
  };
  const put = (node) => { flush(); nodes.push(node); };
  const search = new RegExp(SPECIAL);
  let at = 0;
  while (at < text.length) {
    search.lastIndex = at;
    const found = search.exec(text);
    if (!found) break;
    plain += text.slice(at, found.index);
    at = found.index;
    const c = found[0];
    const next = text[at + 1];
    if (c === "\n") {
      const hard = / {2,}$/.test(plain.slice(-8));
      plain = plain.trimEnd();
      if (hard) put(h("br"));
      else plain += "\n";
      flush();
      at++;
    } else if (c === "\\") {
      if (next === "\n") { put(h("br")); at += 2; }
      else if (next && /[!-/:-@[-`{-~]/.test(next)) { plain += next; at += 2; }
      else { plain += c; at++; }
    } else if (c === "`") {
      const run = /^`+/.exec(text.slice(at, at + REACH))[0];
      let end = text.indexOf(run, at + run.length);
      while (end >= 0 && end - at < 5 * REACH && text[end + run.length] === "`") {
        while (text[end] === "`") end++;
        end = text.indexOf(run, end);
      }
      if (end < 0 || end - at >= 5 * REACH) { plain += run; at += run.length; continue; }
      const code = text.slice(at + run.length, end).replace(/\n/g, " ");
      put(h("code", {}, visible(/^ .*\S.* $/.test(code) ? code.slice(1, -1) : code)));
      at = end + run.length;
    } else if (c === "[" || (c === "!" && next === "[")) {
      const image = c === "!";
      const parts = depth < MAX_DEPTH ? readLink(text, image ? at + 1 : at) : null;
      // Images are not loaded: an address that is fetched tells its owner who reads what.
      const children = parts && (image ? [`Image: ${visible(parts.label || parts.address)}`] : renderInline(parts.label, depth + 1, true));
      const anchor = parts && !inLink ? link(parts.address, children, parts.title) : null;
      if (anchor) { put(anchor); at = parts.end; }
      else if (parts && inLink && image) { put(h("span", {}, ...children)); at = parts.end; }
      else { plain += image ? "![" : c; at += image ? 2 : 1; }
    } else if (c === "<") {
      const auto = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/i.exec(text.slice(at, at + 2100));
      const anchor = auto && !inLink ? link(auto[1], [visible(auto[1])]) : null;
      if (anchor) { put(anchor); at += auto[0].length; } else { plain += c; at++; }
    } else if (c.startsWith("http")) {
      const bare = /^[^\s<>"'`\u0000-\u001f\u202a-\u202e]{1,2000}/.exec(text.slice(at, at + 2000))[0]
        .replace(/[.,;:!?*_~\]]+$/, "").replace(/\)+$/, (m) => (text.slice(at, at + 2000).split(/\s/)[0].includes("(") ? m : ""));
      const anchor = inLink ? null : link(bare, [visible(bare)]);
      if (anchor) { put(anchor); at += bare.length; } else { plain += c; at += c.length; }
    } else if (c === "!") {
      plain += c;
      at++;
    } else {
      let run = 1;
      while (text[at + run] === c && run < REACH) run++;
      const before = text[at - 1];
      // In 2*3*4 a star multiplies.
      const multiplies = c === "*" && run === 1 && /\d/.test(before ?? "") && /\d/.test(text[at + 1] ?? "");
      const opens = !isSpace(text[at + run]) && !(c === "_" && isWord(before)) && !multiplies;
      const size = c === "~" ? 2 : Math.min(run, 2);
      const end = opens && run <= 3 && run >= size && depth < MAX_DEPTH ? closing(text, at + size, text.slice(at, at + size)) : -1;
      if (end < 0) { plain += text.slice(at, at + run); at += run; continue; }
      const tag = c === "~" ? "del" : size === 2 ? "strong" : "em";
      put(h(tag, {}, ...renderInline(text.slice(at + size, end), depth + 1, inLink)));
      at = end + size;
    }
  }
  plain += text.slice(at);
  flush();
  return nodes;
}
