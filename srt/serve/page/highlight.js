// Light colouring of code: comments, strings, numbers, words of the language.
import { h } from "./dom.js";
import { visible } from "./inline.js";

const MOST = 30000;
const words = (text) => new Set(text.split(" "));
const C_LIKE = words("abstract as async await auto bool break case catch char class const continue default defer delete do double else enum export extends extern false final finally float fn for from func function go goto if impl implements import in inline instanceof int interface let long loop match mod mut namespace new nil null nullptr of package private protected pub public return self short signed sizeof static struct super switch template this throw trait true try type typedef typename typeof undefined union unsigned use using var virtual void volatile where while yield");
const PYTHON = words("and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield");
const SHELL = words("case do done elif else esac export fi for function if in local return set then until while sudo cd echo");
const SQL = words("select from where and or not insert into values update set delete create table join left right inner outer on group by order limit having as distinct null primary key index drop alter union all case when then else end");
const STRINGS = String.raw`"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'`;
const REST = String.raw`\b\d[\w.]*\b|[A-Za-z_]\w*`;

function rule(comment, keywords, strings = STRINGS, ignoresCase = false) {
  return { pattern: new RegExp(`(${comment})|(${strings})|(${REST})`, "g"), keywords, ignoresCase };
}

const C = rule(String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, C_LIKE, STRINGS + "|`(?:[^`\\\\]|\\\\.)*`");
const PY = rule("#[^\n]*", PYTHON, String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|` + STRINGS);
const SH = rule("#[^\n]*", SHELL);
const JSON_RULE = rule(String.raw`\/\/[^\n]*`, words("true false null"));
const DATA = rule("#[^\n]*", words("true false null yes no"));
const RULES = { python: PY, py: PY, sh: SH, bash: SH, shell: SH, zsh: SH, console: SH, ruby: PY, rb: PY,
  json: JSON_RULE, yaml: DATA, yml: DATA, toml: DATA, ini: DATA, dockerfile: SH, makefile: SH,
  sql: rule("--[^\n]*", SQL, STRINGS, true) };
for (const name of "c h cpp c++ cc cs java js javascript jsx ts typescript tsx go rust rs swift kotlin kt php scala dart css cuda zig".split(" ")) RULES[name] = C;

/** Nodes of a piece of code in a language. */
export function highlight(code, language) {
  const found = Object.hasOwn(RULES, language) ? RULES[language] : null;
  if (!found || code.length > MOST) return [document.createTextNode(visible(code))];
  const nodes = [];
  let at = 0;
  for (const match of code.matchAll(found.pattern)) {
    const [text, comment, string, other] = match;
    let kind = comment ? "comment" : string ? "string" : null;
    if (other && /\d/.test(other[0])) kind = "number";
    else if (other && found.keywords.has(found.ignoresCase ? other.toLowerCase() : other)) kind = "keyword";
    if (!kind) continue;
    nodes.push(document.createTextNode(visible(code.slice(at, match.index))));
    nodes.push(h("span", { class: `t-${kind}` }, visible(text)));
    at = match.index + text.length;
  }
  nodes.push(document.createTextNode(visible(code.slice(at))));
  return nodes;
}
