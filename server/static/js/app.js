// The page: the open conversation, and sending questions and answers.
import { countTokens, modelFrom } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation, isBusy, newId, ROOT } from "./conversation.js";
import { $, announce, copy, download, nameOf, toast } from "./dom.js";
import { Others } from "./others.js";
import { messagesFor, requestFor } from "./request.js";
import { Run } from "./run.js";
import { defaultSettings, Settings } from "./settings.js";
import { listenForShortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { Status } from "./status.js";
import * as store from "./store.js";
import { Thread } from "./thread.js";
import { resultOf } from "./tools.js";
import { toJSON } from "./transfer.js";

const MOST_TOOL_ROUNDS = 8;
const STALE = 10_000; // milliseconds without an update by the tab that writes an answer

let conversation = Conversation.create(defaultSettings());
let model = ""; // key of the one chosen in the header; default: the server's first model
let own = []; // this server's models
let models = []; // those of other servers, too: see modelFrom
const runs = new Map(); // message id → Run, for all conversations
const gone = new Set(); // ids of conversations deleted while an answer was being written
const live = new Map(); // conversation id → the Conversation that answers are being written into

const isKept = () => conversation.messages.size > 0;

// ---- opening conversations ----

const idsInAddress = () => location.hash.match(/^#\/c\/(\w+)(?:\/(\w+))?$/)?.slice(1) ?? [];
const idInAddress = () => idsInAddress()[0];

/** Show the conversation named in the address, or a new chat. */
async function open() {
  const [id, message] = idsInAddress();
  if (id && id === conversation.id) return message && showMessage(message);
  const found = id ? (live.get(id) ?? (await store.loadConversation(id))) : null;
  if (id !== idInAddress()) return; // meanwhile another one was opened
  if (id && !found) history.replaceState(null, "", "#/");
  conversation = found ?? Conversation.create(defaultSettings());
  if (found) {
    gone.delete(id);
    endStale(found);
  }
  composer.open(found ? found.id : "new");
  settings.show(conversation);
  showConversation();
  thread.followAgain();
  sidebar.refresh(found?.id ?? "");
  if (!matchMedia("(pointer: coarse)").matches) composer.focus(); // focus would open the keyboard of a touch screen
  if (found && message) showMessage(message);
}

/** Show the message, which a search found, and drop it from the address. */
function showMessage(id) {
  history.replaceState(null, "", `#/c/${conversation.id}`);
  conversation.reveal(id);
  showConversation();
  thread.scrollTo(id);
}

// Mark answers that a closed page left unfinished as stopped.
function endStale(found) {
  for (const message of found.messages.values()) {
    if (isBusy(message) && !runs.has(message.id) && Date.now() - message.beat > STALE) message.state = "stopped";
  }
}

function showConversation() {
  thread.show(conversation);
  composer.setBusy(conversation.busy);
  $("log").setAttribute("aria-busy", String(conversation.busy));
  const title = isKept() ? conversation.meta.title : models.length ? $("model-name").textContent : "";
  document.title = title ? `${title} · Quire` : "Quire";
}

function newChat() {
  sidebar.close();
  if (location.hash === "#/" || location.hash === "") composer.focus();
  else location.hash = "#/";
}

async function changedElsewhere(id) {
  sidebar.refresh();
  if (id !== conversation.id || live.has(id)) return;
  const found = await store.loadConversation(id);
  if (id !== conversation.id || live.has(id)) return; // meanwhile another one was opened, or a question was asked
  if (!found) return newChat();
  conversation = found;
  settings.show(conversation);
  showConversation();
}

// ---- asking and answering ----

async function ask(text, attachments) {
  const parent = conversation.path().at(-1)?.id ?? ROOT;
  await begin(conversation, conversation.add({ role: "user", parent, content: text, attachments }));
}

/** Answer a new question. From now on the conversation is saved and has an address. */
async function begin(within, question) {
  const { id } = within;
  live.set(id, within); // what another tab writes now must not replace it
  if (location.hash !== `#/c/${id}`) history.replaceState(null, "", `#/c/${id}`);
  composer.open(id);
  await store.saveConversation(within, [question]);
  sidebar.refresh(id);
  thread.followAgain();
  await answer(within, question.id);
}

/** Generate the answer to the message `parent`, or one answer from each compared model. */
async function answer(within, parent, round = 0) {
  const asked = askedModels(within);
  const group = asked.length > 1 ? newId() : "";
  const answers = asked.map(({ id, server }) => within.add({ role: "assistant", parent, model: id, server, group, ...EMPTY }));
  within.select(answers[0]);
  announce("Answering");
  await Promise.all(answers.map((message) => write(within, message, { round })));
}

/** Return the models that answer in a conversation: the compared ones, or the one in the header. */
function askedModels(within) {
  const chosen = (within.settings.models ?? []).map(modelOf).filter(Boolean);
  return chosen.length > 1 ? chosen : [chosen[0] ?? modelOf(model) ?? { id: "", server: "" }];
}

const modelOf = (key) => models.find((each) => each.key === key);

const EMPTY = { content: "", reasoning: "", calls: [], tokens: [], state: "waiting", error: null, finish: null, stats: null };

async function write(within, message, { resume = false, round = 0 } = {}) {
  const run = new Run(message, {
    changed: () => thread.changed(message),
    save: () => gone.has(within.id) || store.saveConversation(within, [message]),
    explain: () => (message.server ? others.look(message.server) : status.explain()),
  });
  runs.set(message.id, run);
  live.set(within.id, within);
  message.state = "waiting";
  if (within === conversation) showConversation();
  const body = async () => {
    if (!message.server) await status.started(run.signal);
    return requestFor(within, message, resume);
  };
  const error = await run.write(body, resume);
  runs.delete(message.id);
  if (!within.busy) live.delete(within.id);
  if (error?.status === 401 && message.server) settings.open(others.keyField(message.server));
  else if (error?.status === 401) settings.askForKey(error.message);
  if (within === conversation) {
    thread.finished(message);
    showConversation();
    announce(message.state === "failed" ? "" : message.content || "No answer");
  }
  sidebar.refresh();
  if (message.state === "done" && message.calls.length) await runTools(within, message, round);
}

// Run the demonstration tools. Other calls wait for the user to enter a result.
async function runTools(within, message, round) {
  for (const call of message.calls) call.result ??= resultOf(call, within.settings);
  await store.saveConversation(within, [message]);
  if (within === conversation) thread.finished(message);
  await goOn(within, message, round);
}

async function goOn(within, message, round) {
  if (message.calls.every(({ result }) => result !== null) && round < MOST_TOOL_ROUNDS) await answer(within, message.id, round + 1);
}

function stop() {
  for (const message of conversation.messages.values()) runs.get(message.id)?.stop();
}

// ---- what messages offer ----

const actions = {
  manyModels: () => models.length > 1,
  startText: () => (status.kind === "waiting" ? status.text : ""),

  select(message) {
    conversation.select(message);
    store.saveConversation(conversation, []);
    showConversation();
  },

  regenerate(message) {
    if (!conversation.busy) answer(conversation, message.parent);
  },

  resume(message) {
    if (!conversation.busy) write(conversation, message, { resume: true });
  },

  /** Add an alternative to the message with a new text. A new question is answered. */
  edit(message, content) {
    if (conversation.busy) return;
    const { role, parent, attachments } = message;
    if (role === "user") {
      begin(conversation, conversation.add({ role, parent, attachments, content }));
      return;
    }
    const edited = conversation.add({ role, parent, model: message.model, server: message.server, ...EMPTY, content, state: "done", finish: "stop" });
    store.saveConversation(conversation, [edited]);
    showConversation();
  },

  async giveResult(message, call, result) {
    const within = conversation;
    call.result = result;
    await store.saveConversation(within, [message]);
    if (within === conversation) showConversation();
    if (!within.busy) await goOn(within, message, 0);
  },
};

// ---- the parts of the page ----

const thread = new Thread(actions);
const composer = new Composer({
  send: ask,
  editLast: () => thread.editLastQuestion(),
  takesImages: () => askedModels(conversation).every(({ images }) => images),
  writes: () => askedModels(conversation).every(({ writes }) => writes !== false),
});
const sidebar = new Sidebar({
  async renamed(id, names) {
    const found = live.get(id) ?? (id === conversation.id ? conversation : await store.loadConversation(id));
    Object.assign(found.meta, names);
    await store.saveConversation(found, []);
    if (found === conversation) showConversation();
  },
  async deleted(id) {
    gone.add(id);
    for (const message of live.get(id)?.messages.values() ?? []) runs.get(message.id)?.stop();
    await store.deleteConversation(id);
    composer.forget(id);
    if (id === conversation.id) newChat();
  },
  changed: changedElsewhere,
});
const settings = new Settings({
  changed(within) {
    if (within.messages.size > 0) store.saveConversation(within, []);
    if (within === conversation) thread.show(conversation);
  },
  keyChanged: () => status.doubt(),
  opened: () => others.look(),
});
const others = new Others(showModels);
const status = new Status({
  connected(cards) {
    settings.keyAccepted();
    own = cards.map((card) => modelFrom(card));
    settings.showContext(cards[0]?.max_model_len);
    showModels();
    showConversation();
    others.look();
  },
  changed: () => runs.forEach((run) => thread.changed(run.message)),
  locked: (reason) => settings.askForKey(reason),
  async context() {
    const messages = messagesFor(conversation.path(), conversation.settings);
    const { id, server } = modelOf(model) ?? {};
    return messages.length ? countTokens({ messages, ...(id && !server ? { model: id } : {}) }).catch(() => null) : 0;
  },
});

/** Offer the models of all servers. */
function showModels() {
  models = [...own, ...others.models];
  const chosen = modelOf(model) ? model : models[0]?.key;
  $("model-select").replaceChildren(...models.map((each) => new Option(nameOf(each), each.key, false, each.key === chosen)));
  if (own.length) model = chosen;
  settings.showModels(models);
  $("take-photo").hidden = !models.some(({ images }) => images) || !matchMedia("(pointer: coarse)").matches;
  status.showChoice();
}

$("model-select").addEventListener("change", () => (model = $("model-select").value));
$("stop").addEventListener("click", stop);
$("new-chat").addEventListener("click", newChat);
$("new-in-list").addEventListener("click", newChat);
$("open-settings").addEventListener("click", () => settings.open());
$("system-strip").addEventListener("click", () => settings.open("system"));
$("log").addEventListener("click", (event) => {
  const button = event.target.closest(".copy-code");
  if (button) copy(button.closest(".code").querySelector("code").textContent, button);
  const link = event.target.closest('a[href^="#"]'); // a footnote: its link must not replace the conversation in the address
  if (link) {
    event.preventDefault();
    document.getElementById(link.getAttribute("href").slice(1))?.scrollIntoView({ block: "center" });
  }
});
for (const button of document.querySelectorAll(".suggestion")) {
  button.addEventListener("click", () => conversation.busy || ask(button.textContent, []));
}
addEventListener("hashchange", open);
addEventListener("pagehide", () => runs.forEach((run) => run.save()));
addEventListener("beforeunload", (event) => store.hasUnsaved() && event.preventDefault());
store.onChangeElsewhere(changedElsewhere);
store.onRefused((unsaved, { name }) => {
  const why = name === "QuotaExceededError" ? "This browser has no room left" : `This browser saves no conversations (${name})`;
  const save = () => download("conversation.json", toJSON([unsaved]), "application/json");
  toast(`${why}: this conversation is lost when you close the page.`, "Export", save);
});
listenForShortcuts({
  escape: () => sidebar.dismiss() || (conversation.busy && stop()),
  newChat,
  search: () => sidebar.search(),
  toggleSidebar: () => sidebar.toggle(),
  openSettings: () => settings.open(),
  openStatus: () => status.open(),
  copyLast: () => {
    const last = conversation.path().findLast(({ role }) => role === "assistant");
    if (last) copy(last.content, $(`m-${last.id}`).querySelector(".copy"));
  },
  focusPrompt: () => composer.focus(),
});

composer.open("new");
settings.show(conversation);
showConversation();
await open();
sidebar.refresh();
status.look();
