// The page: what is shown, what is kept in the browser, and when to ask the server.
import { ApiError, listModels, streamChat } from "./api.js";
import { renderMarkdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const CONVERSATION = "quire.conversation";
const SETTINGS = "quire.settings";
const KEY = "quire.key";

// One turn: { question, text, reasoning, state, error, stats }, state: waiting | streaming | done | stopped | failed.
let turns = load(localStorage, CONVERSATION, []);
let settings = load(localStorage, SETTINGS, {}); // { system, temperature, maxTokens }, each only when set
let key = load(sessionStorage, KEY, "");
let model = "";
let running = null; // the AbortController of the answer being written
const views = new Map(); // turn → its elements

// ---- storage ------------------------------------------------------------------------------------------------------

function load(storage, name, fallback) {
  try {
    return JSON.parse(storage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

function save(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch {
    // Full or forbidden storage: the page works on, it only forgets.
  }
}

// ---- the conversation on screen -----------------------------------------------------------------------------------

function addView(turn) {
  const root = $("turn-template").content.firstElementChild.cloneNode(true);
  const view = { root };
  const parts = ["answer", "thinking", "thinking-label", "thinking-text", "prose", "waiting", "failure", "failure-text", "meta", "stats"];
  for (const name of parts) view[name] = root.querySelector(`.${name}`);
  root.querySelector(".question-text").textContent = turn.question;
  root.querySelector(".copy").addEventListener("click", (event) => copy(answerOf(turn).text, event.currentTarget));
  root.querySelector(".again").addEventListener("click", () => write(turn));
  root.querySelector(".retry").addEventListener("click", () => write(turn));
  views.set(turn, view);
  $("log").append(root);
  show(turn);
}

function show(turn) {
  const view = views.get(turn);
  if (!view) return;
  const { text, reasoning } = answerOf(turn);
  const busy = turn.state === "waiting" || turn.state === "streaming";
  view.root.dataset.state = turn.state;
  view.thinking.hidden = reasoning === "";
  view["thinking-label"].textContent = busy && text === "" ? "Thinking" : "Thoughts";
  view["thinking-text"].textContent = reasoning;
  renderMarkdown(view.prose, text);
  view.waiting.hidden = !busy || text !== "";
  view.failure.hidden = !turn.error;
  view["failure-text"].textContent = turn.error ?? "";
  view.meta.hidden = busy || text === "";
  view.stats.textContent = turn.stats ?? "";
}

// Models whose reasoning is not parsed by the server write it into the text, between <think> and </think>.
function answerOf(turn) {
  const opened = turn.text.match(/^\s*<think>/);
  if (!opened) return { text: turn.text, reasoning: turn.reasoning };
  const close = turn.text.indexOf("</think>");
  const inner = turn.text.slice(opened[0].length, close < 0 ? undefined : close).trim();
  return { text: close < 0 ? "" : turn.text.slice(close + 8).trimStart(), reasoning: turn.reasoning + inner };
}

function showConversation() {
  views.clear();
  $("log").replaceChildren();
  turns.forEach(addView);
  showWelcome();
  follow(true);
}

function showWelcome() {
  $("welcome").hidden = turns.length > 0;
  $("new-chat").disabled = turns.length === 0;
}

// ---- following the answer down ------------------------------------------------------------------------------------

const scroller = $("scroller");
let following = true;
let lastTop = 0;

function follow(now) {
  if (now) following = true;
  if (following) scroller.scrollTop = scroller.scrollHeight;
  noticeScroll();
}

// A reader who scrolls up is left alone until they come back to the end.
function noticeScroll() {
  const below = scroller.scrollHeight - scroller.clientHeight - scroller.scrollTop;
  if (below < 32) following = true;
  else if (scroller.scrollTop < lastTop - 1) following = false;
  lastTop = scroller.scrollTop;
  $("to-latest").hidden = following || below < 32;
}

// ---- asking and writing -------------------------------------------------------------------------------------------

function ask(question) {
  const turn = { question, text: "", reasoning: "", state: "waiting" };
  turns.push(turn);
  addView(turn);
  showWelcome();
  follow(true);
  return write(turn);
}

/** Write, or write again, the answer of `turn`. The model sees the turns before it. */
async function write(turn) {
  if (running) return;
  const controller = new AbortController();
  Object.assign(turn, { text: "", reasoning: "", state: "waiting", error: null, stats: null });
  setRunning(controller);
  const clock = new Clock();
  let drawn = 0; // the pending animation frame
  let finish = null;
  const draw = () => {
    drawn = 0;
    show(turn);
    follow(false);
  };
  draw();
  announce("Answering");
  try {
    for await (const piece of streamChat(requestFor(turn), { key, signal: controller.signal })) {
      turn.text += piece.text;
      turn.reasoning += piece.reasoning;
      finish = piece.finish ?? finish;
      clock.tick(piece);
      if (piece.text || piece.reasoning) {
        turn.state = "streaming";
        drawn ||= requestAnimationFrame(draw);
      }
    }
    turn.state = "done";
  } catch (error) {
    turn.state = controller.signal.aborted ? "stopped" : "failed";
    if (turn.state === "failed") fail(turn, error);
  }
  cancelAnimationFrame(drawn);
  turn.stats = describe(clock, turn, finish);
  setRunning(null);
  draw();
  save(localStorage, CONVERSATION, turns);
  announce(turn.state === "failed" ? "" : answerOf(turn).text || "No answer");
}

function requestFor(turn) {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const earlier of turns.slice(0, turns.indexOf(turn))) {
    // Templates want user and assistant to alternate, so a question that got no answer is left out.
    if (earlier.text === "") continue;
    messages.push({ role: "user", content: earlier.question }, { role: "assistant", content: earlier.text });
  }
  messages.push({ role: "user", content: turn.question });
  const body = { messages };
  if (model) body.model = model; // else the server's only one
  if (settings.temperature !== undefined) body.temperature = settings.temperature;
  if (settings.maxTokens !== undefined) body.max_tokens = settings.maxTokens;
  return body;
}

function fail(turn, error) {
  turn.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
  if (error.status === 401) askForKey();
  if (error.status === 0) connect();
}

/** Times an answer: the first token, and the pace of the tokens after it. */
class Clock {
  start = performance.now();
  first = null;
  last = null;
  usage = null;

  tick({ text, reasoning, usage }) {
    this.usage = usage ?? this.usage;
    if (!text && !reasoning) return;
    this.last = performance.now();
    this.first ??= this.last;
  }
}

function describe(clock, turn, finish) {
  const parts = [];
  const tokens = clock.usage?.completion_tokens;
  if (tokens) parts.push(`${tokens.toLocaleString()} token${tokens === 1 ? "" : "s"}`);
  const seconds = (clock.last - clock.first) / 1000;
  if (tokens > 2 && seconds > 0) {
    const rate = (tokens - 1) / seconds;
    parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString()} tokens/s`);
    parts.push(`first after ${((clock.first - clock.start) / 1000).toFixed(2)} s`);
  }
  if (finish === "length") parts.push("reached the token limit");
  if (turn.state === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function setRunning(controller) {
  const hadFocus = document.activeElement === $("stop");
  running = controller;
  $("log").setAttribute("aria-busy", String(running !== null));
  $("stop").hidden = running === null;
  $("send").hidden = running !== null;
  if (hadFocus) $("prompt").focus();
  allowSend();
}

function stop() {
  running?.abort();
}

// ---- the composer -------------------------------------------------------------------------------------------------

const prompt = $("prompt");

function allowSend() {
  $("send").disabled = running !== null || prompt.value.trim() === "";
}

function fit() {
  prompt.rows = 1;
  const line = parseFloat(getComputedStyle(prompt).lineHeight);
  prompt.rows = Math.max(1, Math.min(10, Math.round((prompt.scrollHeight - 20) / line)));
  allowSend();
}

function submit() {
  const question = prompt.value.trim();
  if (running || question === "") return;
  prompt.value = "";
  fit();
  ask(question);
}

function newChat() {
  stop();
  const before = turns;
  turns = [];
  save(localStorage, CONVERSATION, turns);
  showConversation();
  prompt.focus();
  offerUndo(() => {
    turns = [...before, ...turns];
    save(localStorage, CONVERSATION, turns);
    showConversation();
  });
}

let toastTimer = 0;

function offerUndo(undo) {
  clearTimeout(toastTimer);
  const close = () => ($("toast").hidden = true);
  $("toast").hidden = false;
  $("undo").onclick = () => {
    close();
    undo();
    prompt.focus();
  };
  toastTimer = setTimeout(close, 8000);
}

function announce(text) {
  $("announcer").textContent = text;
}

async function copy(text, button) {
  await toClipboard(text);
  announce("Copied");
  showCopied(button, true);
  setTimeout(() => showCopied(button, false), 1500);
}

function showCopied(button, copied) {
  button.classList.toggle("copied", copied);
  const icon = button.querySelector("use");
  if (icon) icon.setAttribute("href", copied ? "#icon-check" : "#icon-copy");
  else button.textContent = copied ? "Copied" : "Copy";
}

// navigator.clipboard exists only on https and localhost; elsewhere a selection has to do.
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.className = "unseen";
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// ---- the server ---------------------------------------------------------------------------------------------------

let connecting = false;

/** Ask for the models until the server answers; show what is known meanwhile. */
async function connect() {
  if (connecting) return;
  connecting = true;
  for (let wait = 1000; ; wait = Math.min(wait * 1.5, 10000)) {
    try {
      showModels(await listModels(key));
      break;
    } catch (error) {
      if (error.status === 401) {
        status("locked", "needs an API key");
        askForKey();
        break;
      }
      status("offline", error.status ? error.message : "server not reachable");
    }
    await new Promise((resume) => setTimeout(resume, wait));
  }
  connecting = false;
}

function showModels(cards) {
  if (!cards.some((card) => card.id === model)) model = cards[0]?.id ?? "";
  $("model-select").replaceChildren(...cards.map((card) => new Option(shortName(card.id), card.id, false, card.id === model)));
  const card = cards.find(({ id }) => id === model);
  status("ready", shortName(model));
  $("model-name").hidden = cards.length > 1;
  $("model-select").hidden = cards.length <= 1;
  const room = card?.max_model_len;
  $("max-tokens-help").textContent = room ? `The model holds ${room.toLocaleString()} tokens: the conversation and the answer together.` : "";
  document.title = `${shortName(model)} · Quire`;
}

// A model served from a folder is named by its path: its last part says enough.
function shortName(id) {
  return id.startsWith("/") || id.startsWith(".") ? id.replace(/\/+$/, "").split("/").pop() : id;
}

function status(kind, text) {
  $("status-dot").dataset.status = kind;
  $("model-name").textContent = text;
  $("model-name").title = kind === "ready" ? model : text;
  $("model-name").hidden = false;
  if (kind !== "ready") $("model-select").hidden = true;
}

function askForKey() {
  $("key-row").hidden = false;
  openSettings();
  $("api-key").focus();
}

// ---- settings -----------------------------------------------------------------------------------------------------

function openSettings() {
  showSettings();
  if (!$("settings").open) $("settings").showModal();
}

function showSettings() {
  $("system").value = settings.system ?? "";
  $("temperature").value = settings.temperature ?? 1;
  $("temperature").classList.toggle("unset", settings.temperature === undefined);
  $("temperature-value").textContent = settings.temperature?.toFixed(2) ?? "the model’s own";
  $("max-tokens").value = settings.maxTokens ?? "";
  $("api-key").value = key;
}

function readSettings(event) {
  if (event.target === $("system")) settings.system = $("system").value || undefined;
  if (event.target === $("temperature")) settings.temperature = Number($("temperature").value);
  if (event.target === $("max-tokens")) {
    const value = $("max-tokens").valueAsNumber;
    settings.maxTokens = Number.isInteger(value) && value > 0 ? value : undefined;
  }
  if (event.target === $("api-key")) {
    key = $("api-key").value.trim();
    save(sessionStorage, KEY, key);
    return;
  }
  save(localStorage, SETTINGS, settings);
  if (event.target === $("temperature")) showSettings();
}

// ---- wiring -------------------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) stop();
});
$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", newChat);
$("open-settings").addEventListener("click", openSettings);
$("settings").addEventListener("input", readSettings);
$("settings").addEventListener("close", () => {
  if ($("status-dot").dataset.status !== "ready") connect();
  prompt.focus();
});
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close(); // the backdrop
});
$("reset").addEventListener("click", () => {
  settings = {};
  save(localStorage, SETTINGS, settings);
  showSettings();
});
$("model-select").addEventListener("change", () => {
  model = $("model-select").value;
  connect();
});
$("to-latest").addEventListener("click", () => follow(true));
$("log").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copy(button.closest(".code").querySelector("code").textContent, button);
});
for (const button of document.querySelectorAll(".suggestion")) {
  button.addEventListener("click", () => running || ask(button.textContent));
}
scroller.addEventListener("scroll", noticeScroll, { passive: true });
new ResizeObserver(() => follow(false)).observe(scroller);
addEventListener("pagehide", () => running && save(localStorage, CONVERSATION, turns));

// What a closed page left unfinished stays as far as it came.
for (const turn of turns) {
  if (turn.state === "waiting" || turn.state === "streaming") Object.assign(turn, { state: "stopped", stats: "stopped" });
}
showConversation();
fit();
if (!matchMedia("(pointer: coarse)").matches) prompt.focus(); // a touch screen would open its keyboard
connect();
