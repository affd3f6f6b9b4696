// Small helpers: elements, icons, notices.

export const $ = (id) => document.getElementById(id);

/** Create an element with properties (`class`, `on…` listeners, attributes) and children. Strings become text nodes. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick, className = "") {
  return element("button", { type: "button", "aria-label": label, title: label, class: className, onclick }, icon(name));
}

/** Announce a text to screen readers. */
export function announce(text) {
  $("announcer").textContent = text;
}

/** Place a fixed panel below `anchor`, or above it where there is no room below. */
export function place(panel, anchor) {
  const box = anchor.getBoundingClientRect();
  const fits = box.bottom + 6 + panel.offsetHeight <= innerHeight - 8;
  panel.style.left = `${Math.max(8, Math.min(box.left, innerWidth - panel.offsetWidth - 8))}px`;
  panel.style.top = `${fits ? box.bottom + 6 : Math.max(8, box.top - panel.offsetHeight - 6)}px`;
}

let toastTimer = 0;

/** Show a notice for 8 seconds, with an optional action. */
export function toast(text, action = "", run = null) {
  clearTimeout(toastTimer);
  const close = () => ($("toast").hidden = true);
  $("toast-text").textContent = text;
  $("toast-action").textContent = action;
  $("toast-action").hidden = !action;
  $("toast-action").onclick = () => {
    close();
    run();
  };
  const dialog = document.querySelector("dialog[open]"); // what is outside of it cannot be used
  (dialog ?? document.body).append($("toast"));
  dialog?.addEventListener("close", () => document.body.append($("toast")), { once: true });
  $("toast").hidden = false;
  toastTimer = setTimeout(close, 8000);
}

export async function copy(text, button) {
  await toClipboard(text);
  announce("Copied");
  showCopied(button, true);
  setTimeout(() => showCopied(button, false), 1500);
}

function showCopied(button, copied) {
  button.classList.toggle("copied", copied);
  const use = button.querySelector("use");
  if (use) use.setAttribute("href", copied ? "#icon-check" : "#icon-copy");
  else button.textContent = copied ? "Copied" : "Copy";
}

// navigator.clipboard exists only on https and localhost; elsewhere copy a selection.
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Download `text` as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Return a short name for a model served from a folder: the last part of its path. */
export function shortName(id) {
  return id.startsWith("/") || id.startsWith(".") ? id.replace(/\/+$/, "").split("/").pop() : id;
}

export const hostOf = (server) => server.replace(/^https?:\/\/|\/$/g, "");

/** Return the name of a model { id, server } for people. */
export const nameOf = ({ id, server }) => shortName(id) + (server ? ` · ${hostOf(server)}` : "");

export function load(name, fallback, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function save(name, value, storage = "localStorage") {
  try {
    if (value === undefined) window[storage].removeItem(name);
    else window[storage].setItem(name, JSON.stringify(value));
  } catch {
    // Storage is full or blocked: the page still works without saving.
  }
}
