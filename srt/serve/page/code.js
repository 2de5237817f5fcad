// Light colouring of code: strings, comments, numbers and common keywords, as text nodes and spans.

const KEYWORDS = new Set((
  "and as assert async await break case catch class const constexpr continue def default del do elif else end enum "
  + "except export extends extern false False final finally fn for from func function if impl implements import in "
  + "include inline int interface is lambda let loop match mod mut namespace new nil none None not null or override "
  + "package pass private protected pub public raise return self sizeof static struct super switch template then this "
  + "throw trait true True try type typedef typeof union unsigned use using var virtual void where while with yield "
  + "SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE JOIN ON GROUP ORDER BY LIMIT echo fi done esac"
).split(" "));
const HASH_COMMENTS = /^(py|python|sh|bash|zsh|shell|console|rb|ruby|yaml|yml|toml|r|perl|make|makefile|dockerfile|ini|conf|cmake|elixir)$/i;
const MAX_COLOURED = 50_000; // characters; longer code is plain

function pattern(language) {
  const comment = HASH_COMMENTS.test(language) ? "#[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)|<!--[^]*?(?:-->|$)|--\\s[^\\n]*";
  return new RegExp([
    `(?<comment>${comment})`,
    "(?<string>\"\"\"[^]*?(?:\"\"\"|$)|'''[^]*?(?:'''|$)|\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'|`(?:\\\\.|[^`\\\\])*`)",
    "(?<number>\\b(?:0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)",
    "(?<word>\\b[A-Za-z_]\\w*\\b)",
  ].join("|"), "g");
}

// Nodes and texts of some code.
export function colour(text, language) {
  if (!language || /^(text|txt|plain|plaintext|output)$/i.test(language) || text.length > MAX_COLOURED) return [text];
  const out = [];
  let plain = "";
  let end = 0;
  const push = (value, kind) => {
    if (plain) out.push(plain);
    plain = "";
    const span = document.createElement("span");
    span.className = `tok-${kind}`;
    span.textContent = value;
    out.push(span);
  };
  for (const match of text.matchAll(pattern(language))) {
    const { comment, string, number, word } = match.groups;
    plain += text.slice(end, match.index);
    end = match.index + match[0].length;
    if (comment) push(comment, "comment");
    else if (string) push(string, "string");
    else if (number) push(number, "number");
    else if (KEYWORDS.has(word)) push(word, "keyword");
    else plain += word;
  }
  plain += text.slice(end);
  if (plain) out.push(plain);
  return out;
}
