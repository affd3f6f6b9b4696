// Small helpers: elements, icons, notices.

export const $ = (id) => document.getElementById(id);

/** An element with properties (`class`, `dataset`, `on…` listeners, attributes) and children. Texts stay text. */
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

/** For screen readers. */
export function announce(text) {
  $("announcer").textContent = text;
}

let toastTimer = 0;

/** A notice for some seconds, with at most one thing to do about it. */
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

// navigator.clipboard exists only on https and localhost; elsewhere a selection has to do.
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Offer `text` as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A shorter name of a model that is served from a folder: the last part of the path. */
export function shortName(id) {
  return id.startsWith("/") || id.startsWith(".") ? id.replace(/\/+$/, "").split("/").pop() : id;
}

export function load(name, fallback, storage = localStorage) {
  try {
    return JSON.parse(storage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function save(name, value, storage = localStorage) {
  try {
    if (value === undefined) storage.removeItem(name);
    else storage.setItem(name, JSON.stringify(value));
  } catch {
    // Full or forbidden storage: the page works on, it only forgets.
  }
}
