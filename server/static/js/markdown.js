// Renders streaming Markdown: finished blocks keep their elements, and only the rest is parsed again.
//
// markdown-it produces tokens, and HTML for leaf blocks such as paragraphs; the model's own HTML is escaped. DOMPurify
// removes everything not on its allow-list. Lists, quotes and tables are built here as elements, so that a change in one
// item does not affect the others.
import { DOMPurify } from "../vendor/dompurify.js";
import { footnote, MarkdownIt, tasklist, tex } from "../vendor/markdown-it.js";
import { element } from "./dom.js";

const CONTAINERS = new Set(["bullet_list", "ordered_list", "list_item", "blockquote", "table", "thead", "tbody", "tr"]);
const LONG_CELL = 24; // characters of a table's cell that may wrap
const MOST_HIGHLIGHTED = 60_000; // characters; highlighting more would block the page
const MOST_HIGHLIGHTED_STREAMING = 6_000;
const REFERENCES = /^ {0,3}\[[^\]\n]+\]:/m; // link references and footnotes may be defined after their use

const md = new MarkdownIt({ breaks: true, linkify: true })
  .use(footnote)
  .use(tasklist, { label: false })
  .use(tex, { delimiters: "all", mathFence: true, render: (text, display) => mathHTML(text, display) });
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
md.validateLink = (url) => /^(https?:|mailto:)/i.test(url.trim());
md.core.ruler.push("fit_into_page", ({ tokens }) => {
  for (const token of tokens) {
    if (token.type.startsWith("heading")) token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`; // below the page's own headings
    const style = token.attrGet("style"); // of a table cell; the page's security policy forbids inline styles
    if (style) token.attrs = [["class", style.replace("text-align:", "align-")]];
  }
});
md.renderer.rules.link_open = (tokens, index, options, env, self) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer nofollow");
  return self.renderToken(tokens, index, options);
};
md.renderer.rules.footnote_block_open = () => '<section class="footnotes"><ol>';
md.renderer.rules.footnote_block_close = () => "</ol></section>";
// The page loads nothing from other servers: an image becomes a link.
md.renderer.rules.image = (tokens, index) => {
  const address = md.utils.escapeHtml(tokens[index].attrGet("src"));
  const label = md.utils.escapeHtml(tokens[index].content || "picture");
  return `<a href="${address}" target="_blank" rel="noopener noreferrer nofollow">${label}</a>`;
};

function mathHTML(text, display) {
  const html = `<span class="math${display ? " display" : ""}">${md.utils.escapeHtml(text)}</span>`;
  return display ? `<p>${html}</p>` : html;
}

const PURE = {
  ALLOWED_TAGS: (
    "p br strong em s code pre a hr h3 h4 h5 h6 span sup section blockquote ul ol li input table tbody tr th td"
  ).split(" "),
  ALLOWED_ATTR: ["href", "target", "rel", "class", "id", "type", "checked", "disabled", "start"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

// ---- libraries that only some answers need ----

let temml = null;
let highlighter = null;

/** Promises of the libraries for formulas and code. Until they are loaded, both are shown as plain text. */
const libraries = { temml: null, highlighter: null };
const loadTemml = () => (libraries.temml ??= import("../vendor/temml.js").then((module) => (temml = module.temml)));
const loadHighlighter = () =>
  (libraries.highlighter ??= import("../vendor/highlight.js").then((module) => (highlighter = module.highlighter)));

function drawMath(span) {
  const source = span.textContent;
  const options = { displayMode: span.classList.contains("display"), maxExpand: 500, maxSize: [50, 50] };
  const draw = () => temml.render(source, span, options);
  if (temml) draw();
  else loadTemml().then(draw);
}

// ---- the text as a tree of nodes ----
// A container: { key, tag, attributes, children, line }; a code block: { key, code, line }; else { key: its HTML, line }.
// Nodes with equal keys can keep their element.

function parse(text, env) {
  const tokens = md.parse(text, env);
  const stack = [{ children: [] }];
  for (let at = 0; at < tokens.length; ) {
    const token = tokens[at];
    const kind = token.type.replace(/_(open|close)$/, "");
    if (CONTAINERS.has(kind)) {
      if (token.nesting > 0) stack.push(container(token));
      else {
        const node = stack.pop();
        stack.at(-1).children.push(node);
      }
      at += 1;
    } else {
      const end = endOf(tokens, at);
      stack.at(-1).children.push(leaf(tokens, at, end, env));
      at = end;
    }
  }
  return stack[0].children;
}

function container(token) {
  const attributes = Object.fromEntries((token.attrs ?? []).filter(([name]) => name === "start" || name === "class"));
  return { key: `<${token.tag} ${JSON.stringify(attributes)}>`, tag: token.tag, attributes, children: [], line: token.map?.[0] };
}

function endOf(tokens, start) {
  let depth = 0;
  let at = start;
  do {
    depth += tokens[at].nesting;
    at += 1;
  } while (depth > 0);
  return at;
}

function leaf(tokens, start, end, env) {
  const token = tokens[start];
  const line = token.map?.[0];
  if ((token.type === "fence" && token.info.trim() !== "math") || token.type === "code_block") {
    const language = token.info.trim().split(/\s/)[0];
    return { key: `code ${language}`, code: { language, text: token.content.replace(/\n$/, "") }, line };
  }
  let html = md.renderer.render(tokens.slice(start, end), md.options, env);
  // An item of a tight list has no paragraph element around its text.
  if (token.type === "paragraph_open" && token.hidden) html = `<p class="tight">${html}</p>`;
  return { key: html, line };
}

// ---- nodes as elements ----

const drawn = new WeakMap(); // element → the node it shows

/** Update the children of `parent`, starting at `first`, to show `nodes`. `done`: the last node is final. */
function sync(parent, nodes, first, done) {
  nodes.forEach((node, index) => {
    const old = parent.children[first + index];
    const last = !done && index === nodes.length - 1;
    if (old && drawn.get(old)?.key === node.key) {
      if (node.children) sync(inner(old), node.children, 0, !last);
      else if (node.code) drawCode(old, node.code, last);
      drawn.set(old, node);
      return;
    }
    const fresh = build(node, last);
    drawn.set(fresh, node);
    if (old) old.replaceWith(fresh);
    else parent.append(fresh);
  });
  while (parent.children.length > first + nodes.length) parent.lastElementChild.remove();
}

// A table is wrapped in a scrolling box.
const inner = (built) => (built.matches(".table") ? built.firstElementChild : built);

function build(node, streaming) {
  if (node.code) return codeBlock(node.code, streaming);
  if (node.children) {
    const built = element(node.tag, { dir: "auto", ...node.attributes });
    sync(built, node.children, 0, !streaming);
    return node.tag === "table" ? element("div", { class: "table", tabindex: "0" }, built) : built;
  }
  const fragment = DOMPurify.sanitize(insideTable(node.key), PURE);
  const built = fragment.querySelector("th, td") ?? fragment.firstElementChild ?? element("p");
  built.setAttribute("dir", "auto");
  if (built.matches("th, td") && built.textContent.length > LONG_CELL) built.classList.add("long");
  built.querySelectorAll(".math").forEach(drawMath);
  for (const box of built.querySelectorAll("input")) box.setAttribute("aria-label", box.checked ? "done" : "to do");
  return built;
}

// Browsers drop table cells outside a table.
function insideTable(html) {
  return /^<t[hd]/.test(html) ? `<table><tbody><tr>${html}</tr></tbody></table>` : html;
}

function codeBlock(code, streaming) {
  const head = element("div", { class: "code-head" }, element("span", {}, code.language || "text"));
  head.append(element("button", { type: "button", class: "copy-code" }, "Copy"));
  const pre = element("pre", { tabindex: "0", dir: "ltr" }, element("code"));
  const box = element("div", { class: "code" }, head, pre);
  drawCode(box, code, streaming);
  return box;
}

function drawCode(box, { language, text }, streaming) {
  const target = box.querySelector("code");
  const highlights = text.length <= (streaming ? MOST_HIGHLIGHTED_STREAMING : MOST_HIGHLIGHTED) && language !== "";
  if (highlights && !highlighter) loadHighlighter().then(() => box.isConnected && drawCode(box, drawn.get(box).code, streaming));
  const shown = target.textContent;
  if (highlights && highlighter?.getLanguage(language)) {
    if (shown === text && target.dataset.highlighted) return;
    const { rootNode } = highlighter.highlight(text, { language, ignoreIllegals: true })._emitter;
    target.replaceChildren(...rootNode.children.map(highlighted));
    target.dataset.highlighted = "true";
  } else if (text.startsWith(shown)) {
    if (text.length === shown.length) return;
    target.append(text.slice(shown.length));
    delete target.dataset.highlighted;
  } else {
    target.textContent = text;
    delete target.dataset.highlighted;
  }
}

function highlighted(node) {
  if (typeof node === "string") return node;
  return element("span", { class: `hljs-${(node.scope ?? "").split(".")[0]}` }, ...node.children.map(highlighted));
}

// ---- answers that are JSON ----

/** Return `text` as a code block of Markdown. One that is not `closed` can grow. */
export function fenced(text, language = "", closed = true) {
  const longest = Math.max(0, ...Array.from(text.matchAll(/`+/g), ([run]) => run.length));
  const fence = "`".repeat(Math.max(3, longest + 1));
  return `${fence}${language}\n${text}${closed ? `\n${fence}` : ""}`;
}

/** Return whether an answer is a JSON object or list, or, if it is not `done`, begins like an object. */
export function isJSON(text, done) {
  if (!done) return /^\s*\{\s*("|$)/.test(text);
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Indent JSON without reading its values: numbers and strings stay as they are written. */
export function indented(json) {
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  const tokens = json.match(/"(?:\\.|[^"\\])*"|[{[]\s*[}\]]|[{}[\],:]|[^\s{}[\],:"]+/g) ?? [];
  const written = (token) => {
    if (token === "{" || token === "[") depth += 1;
    if (token === "}" || token === "]") depth -= 1;
    if (token === "}" || token === "]") return line() + token;
    if (token === "{" || token === "[" || token === ",") return token + line();
    return token === ":" ? ": " : token;
  };
  return tokens.map(written).join("");
}

// ---- public interface ----

/** Shows a growing text in an element. */
export class MarkdownView {
  #text = "";
  #done = null;
  #start = 0; // start of the text that may still change
  #kept = 0; // number of finished elements before it

  constructor(container, name) {
    this.container = container;
    this.name = name; // makes the ids of footnotes unique in the page
  }

  /** Show `text`. `done`: the text is complete. */
  update(text, done) {
    text = text.replace(/\r\n?/g, "\n");
    if (text === this.#text && done === this.#done) return;
    this.#done = done;
    const whole = done && REFERENCES.test(text);
    if (whole || !text.startsWith(this.#text)) this.#restart();
    this.#text = text;
    const rest = text.slice(this.#start);
    const nodes = parse(rest, { docId: this.name });
    sync(this.container, nodes, this.#kept, done);
    if (!done) this.#finish(nodes, rest);
  }

  #restart() {
    this.container.replaceChildren();
    this.#start = this.#kept = 0;
  }

  // A block is finished once another one begins after it.
  #finish(nodes, rest) {
    const last = nodes.at(-1);
    if (nodes.length < 2 || !last.line || REFERENCES.test(rest)) return;
    let offset = 0;
    for (let line = 0; line < last.line; line += 1) offset = rest.indexOf("\n", offset) + 1;
    // `sync` has drawn the block before the last as finished.
    this.#start += offset;
    this.#kept += nodes.length - 1;
  }
}
