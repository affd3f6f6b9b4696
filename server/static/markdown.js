// The Markdown that models write: text in, DOM nodes out. Text only ever becomes textContent, never markup.
const MAX_DEPTH = 8; // nesting beyond this is shown as plain text

/** Render `text` into `container`. Blocks whose source did not change keep their nodes, so streaming stays cheap. */
export function renderMarkdown(container, text) {
  const blocks = splitBlocks(text.replace(/\r\n?/g, "\n").split("\n"));
  blocks.forEach((block, index) => {
    const old = container.children[index];
    const source = `${block.kind}\n${block.source}`;
    if (old?.markdownSource === source) return;
    const node = buildBlock(block, 0);
    node.markdownSource = source;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

// ---- blocks -------------------------------------------------------------------------------------------------------

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:?)? *$/;

function splitBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const start = at;
    let block;
    if (line.trim() === "") {
      at += 1;
      continue;
    } else if (FENCE.test(line)) {
      const [, mark, info] = line.match(FENCE);
      at += 1;
      while (at < lines.length && !closesFence(lines[at], mark)) at += 1;
      block = { kind: "code", language: info.trim().split(/\s/)[0], lines: lines.slice(start + 1, at) };
      at += 1;
    } else if (HEADING.test(line)) {
      const [, marks, title] = line.match(HEADING);
      at += 1;
      block = { kind: "heading", level: marks.length, text: title.trim().replace(/ #+$/, "") };
    } else if (RULE.test(line)) {
      at += 1;
      block = { kind: "rule" };
    } else if (QUOTE.test(line)) {
      while (at < lines.length && QUOTE.test(lines[at])) at += 1;
      block = { kind: "quote", lines: lines.slice(start, at).map((quoted) => quoted.replace(/^ {0,3}> ?/, "")) };
    } else if (ITEM.test(line)) {
      at = endOfList(lines, at);
      block = { kind: "list", lines: lines.slice(start, at) };
    } else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) {
      while (at < lines.length && lines[at].includes("|")) at += 1;
      block = { kind: "table", lines: lines.slice(start, at) };
    } else {
      at += 1;
      while (at < lines.length && lines[at].trim() !== "" && !startsBlock(lines[at])) at += 1;
      block = { kind: "paragraph", text: lines.slice(start, at).map((part) => part.trim()).join("\n") };
    }
    blocks.push({ ...block, source: lines.slice(start, at).join("\n") });
  }
  return blocks;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function closesFence(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
}

// A list goes on over item lines, indented lines, and blank lines that one of these follows.
function endOfList(lines, start) {
  const [, indent, mark] = lines[start].match(ITEM);
  const belongs = (line) => {
    if (line.search(/\S/) > indent.length + 1) return true;
    const item = RULE.test(line) ? null : line.match(ITEM);
    return item !== null && /\d/.test(item[2]) === /\d/.test(mark);
  };
  let at = start + 1;
  while (at < lines.length) {
    const next = lines[at].trim() === "" ? at + 1 : at;
    if (next >= lines.length || !belongs(lines[next])) break;
    at = next + 1;
  }
  return at;
}

function buildBlock(block, depth) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading":
      return element(`h${Math.min(block.level + 2, 6)}`, inline(block.text));
    case "rule":
      return document.createElement("hr");
    case "quote":
      return element("blockquote", buildAll(block.lines, depth + 1));
    case "list":
      return list(block.lines, depth + 1);
    case "table":
      return table(block.lines);
    default:
      return element("p", inline(block.text));
  }
}

function buildAll(lines, depth) {
  if (depth > MAX_DEPTH) return [document.createTextNode(lines.join("\n"))];
  return splitBlocks(lines).map((block) => buildBlock(block, depth));
}

function codeBlock({ language, lines }) {
  const copy = element("button", ["Copy"]);
  copy.type = "button";
  copy.className = "copy-code";
  const head = element("div", [element("span", [language || "text"]), copy]);
  head.className = "code-head";
  const box = element("div", [head, element("pre", [element("code", [lines.join("\n")])])]);
  box.className = "code";
  return box;
}

function list(lines, depth) {
  const [, , firstMark] = lines[0].match(ITEM);
  const node = document.createElement(/\d/.test(firstMark) ? "ol" : "ul");
  if (node.tagName === "OL") node.start = parseInt(firstMark, 10);
  const base = lines[0].match(ITEM)[1].length;
  let item = [];
  let width = 0;
  const close = () => {
    if (!item.length) return;
    const parts = buildAll(item, depth);
    const loose = item.some((line, index) => line.trim() === "" && index < item.length - 1);
    // In a tight list the first paragraph is the item's own text.
    if (!loose && parts[0]?.tagName === "P") parts.splice(0, 1, ...parts[0].childNodes);
    node.append(element("li", parts));
  };
  for (const line of lines) {
    const start = line.match(ITEM);
    if (start && start[1].length <= base + 1) {
      close();
      width = start[0].length - start[3].length + 1;
      item = [line.slice(start[0].length)];
    } else {
      item.push(line.slice(Math.min(width, line.search(/\S|$/))));
    }
  }
  close();
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
  const row = (line, tag) => element("tr", cells(line).map((cell) => element(tag, inline(cell.trim()))));
  const head = element("thead", [row(lines[0], "th")]);
  const body = element("tbody", lines.slice(2).map((line) => row(line, "td")));
  const box = element("div", [element("table", [head, body])]);
  box.className = "table";
  return box;
}

// ---- inline -------------------------------------------------------------------------------------------------------

const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const LINK = /\[([^[\]\n]{1,300})\]\(([^()\s]{1,2000})\)/y;
const BARE_LINK = /https?:\/\/[^\s<>"'`*]{1,2000}/y;
const WORD = /[\p{L}\p{N}]/u;

function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [document.createTextNode(text)];
  const nodes = [];
  const missing = new Set(); // closers known not to occur again: keeps a run of stray marks linear
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  const emit = (node, next) => {
    flush();
    nodes.push(node);
    at = next;
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (char === "\n") {
      emit(document.createElement("br"), at + 1);
    } else if (char === "`") {
      const mark = text.slice(at).match(/^`+/)[0];
      const close = missing.has(mark) ? -1 : closingTicks(text, mark, at + mark.length);
      if (close < 0) {
        missing.add(mark);
        plain += mark;
        at += mark.length;
      } else {
        const code = text.slice(at + mark.length, close);
        emit(element("code", [code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code]), close + mark.length);
      }
    } else if (char === "[" && matchAt(LINK, text, at)) {
      const [whole, label, target] = matchAt(LINK, text, at);
      const url = webAddress(target);
      if (url) emit(link(url, inline(label, depth + 1)), at + whole.length);
      else {
        plain += char;
        at += 1;
      }
    } else if (char === "h" && matchAt(BARE_LINK, text, at)) {
      const address = matchAt(BARE_LINK, text, at)[0].replace(/[.,;:!?)\]]+$/, "");
      const url = webAddress(address);
      if (url) emit(link(url, [document.createTextNode(address)]), at + address.length);
      else {
        plain += char;
        at += 1;
      }
    } else {
      const [mark, tag] = PAIRS.find(([candidate]) => text.startsWith(candidate, at)) ?? [char, null];
      const close = tag && !missing.has(mark) && opens(text, mark, at) ? closing(text, mark, at + mark.length) : -1;
      if (close >= 0) {
        emit(element(tag, inline(text.slice(at + mark.length, close), depth + 1)), close + mark.length);
      } else {
        if (tag && opens(text, mark, at)) missing.add(mark);
        plain += mark;
        at += mark.length;
      }
    }
  }
  flush();
  return nodes;
}

function opens(text, mark, at) {
  const next = text[at + mark.length];
  if (next === undefined || /\s/.test(next)) return false;
  return mark[0] !== "_" || at === 0 || !WORD.test(text[at - 1]);
}

// Where `mark` closes: not after a space, not inside a longer run of the same character, "_" only at a word's end.
function closing(text, mark, from) {
  for (let at = text.indexOf(mark, from); at >= 0; at = text.indexOf(mark, at)) {
    let run = at;
    while (text[run] === mark[0]) run += 1;
    const exact = mark.length === 2 ? run - at >= 2 : run - at === 1;
    const spaced = /\s/.test(text[at - 1]);
    const inWord = mark[0] === "_" && run < text.length && WORD.test(text[run]);
    if (exact && at > from && !spaced && !inWord) return run - mark.length;
    at = run;
  }
  return -1;
}

function closingTicks(text, mark, from) {
  for (let at = text.indexOf(mark, from); at >= 0; ) {
    let run = at;
    while (text[run] === "`") run += 1;
    if (run - at === mark.length) return at;
    at = text.indexOf(mark, run);
  }
  return -1;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function webAddress(target) {
  try {
    const url = new URL(target);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

function link(url, children) {
  const node = element("a", children);
  node.href = url;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}

function element(tag, children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}
