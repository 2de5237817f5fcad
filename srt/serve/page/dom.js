// Elements without HTML: text stays text.

/** An element with properties, attributes (names with a dash, `role`, `class`) and children. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.includes("-") || name === "role" || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Copies a text and says so on the button for a moment. */
export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Without https the clipboard is closed to pages, but a selection can still be copied.
    const area = h("textarea", { value: text, class: "hidden-text" });
    (button.closest("dialog") ?? document.body).append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not allowed";
    area.remove();
    button.focus();
  }
  setTimeout(() => { button.textContent = label; }, 1200);
}

/** Offers a text as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
