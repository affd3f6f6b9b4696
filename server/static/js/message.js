// One message on the page: its elements and actions.
import { isBusy } from "./conversation.js";
import { $, copy, element, iconButton, nameOf, place } from "./dom.js";
import { thumbnail } from "./images.js";
import { fenced, indented, isJSON, MarkdownView } from "./markdown.js";
import { splitThoughts } from "./run.js";
import { tokensView } from "./tokens.js";

const number = (value) => value.toLocaleString("en");
const rate = (value) => (value < 10 ? value.toFixed(1) : number(Math.round(value)));

/** Return the view of a message. `update()` redraws it. `actions`: callbacks for its buttons. */
export function viewOf(message, conversation, actions) {
  return new (message.role === "user" ? QuestionView : AnswerView)(message, conversation, actions);
}

class MessageView {
  constructor(template, message, conversation, actions) {
    this.root = $(template).content.firstElementChild.cloneNode(true);
    this.root.id = `m-${message.id}`;
    Object.assign(this, { message, conversation, actions });
  }

  part(name) {
    return this.root.querySelector(`.${name}`);
  }

  button(name, run) {
    this.part(name).addEventListener("click", run);
  }

  /** Show ‹ 2/3 › if the message has alternatives. */
  showAlternatives() {
    const alternatives = this.conversation.alternatives(this.message);
    const at = alternatives.indexOf(this.message);
    const go = (step) => this.actions.select(alternatives[at + step]);
    const back = iconButton("back", "Previous alternative", () => go(-1));
    const forth = iconButton("forth", "Next alternative", () => go(1));
    back.disabled = at === 0;
    forth.disabled = at === alternatives.length - 1;
    const label = element("span", { class: "count" }, `${at + 1}/${alternatives.length}`);
    this.part("branches").replaceChildren(...(alternatives.length > 1 ? [back, label, forth] : []));
  }

  /** Let the user edit the text in place. */
  edit(shown, submitLabel) {
    const area = element("textarea", { class: "edit-text", "aria-label": "Edit message", dir: "auto", enterkeyhint: "send" });
    area.value = this.message.content;
    const fit = () => (area.rows = Math.max(1, Math.min(16, area.value.split("\n").length)));
    area.addEventListener("input", fit);
    fit();
    const close = () => {
      form.remove();
      shown.hidden = shown.classList.contains("question-text") && this.message.content === "";
      this.root.classList.remove("editing");
    };
    const save = element("button", { type: "submit", class: "primary" }, submitLabel);
    const cancel = element("button", { type: "button", class: "plain", onclick: close }, "Cancel");
    const form = element("form", { class: "edit" }, area, element("div", { class: "edit-foot" }, cancel, save));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close();
      if (area.value !== this.message.content) this.actions.edit(this.message, area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
      event.stopPropagation();
    });
    shown.hidden = true;
    this.root.classList.add("editing");
    shown.after(form);
    area.focus();
  }
}

class QuestionView extends MessageView {
  constructor(message, conversation, actions) {
    super("question-template", message, conversation, actions);
    this.part("question-text").textContent = message.content;
    this.part("question-text").hidden = message.content === "";
    const files = (message.attachments ?? []).map(({ name, text, image }) =>
      image ? thumbnail({ name, image }) : element("details", { class: "attachment" }, element("summary", { dir: "auto" }, name), element("pre", { tabindex: "0" }, text)),
    );
    this.part("attachments").append(...files);
    this.button("copy", (event) => copy(message.content, event.currentTarget));
    this.button("edit-button", () => this.edit(this.part("question-text"), "Send"));
  }

  update() {
    this.showAlternatives();
  }
}

class AnswerView extends MessageView {
  constructor(message, conversation, actions) {
    super("answer-template", message, conversation, actions);
    this.prose = new MarkdownView(this.part("prose"), message.id);
    this.thoughts = new MarkdownView(this.part("thinking-text"), `thoughts-${message.id}`);
    this.button("copy", (event) => copy(message.content, event.currentTarget));
    this.button("again", () => actions.regenerate(message));
    this.button("retry", () => actions.regenerate(message));
    this.button("resume", () => actions.resume(message));
    this.button("edit-button", () => this.edit(this.part("prose"), "Save"));
    this.button("show-tokens", () => this.toggleTokens());
    this.button("stats", (event) => showFigures(event.currentTarget, message));
    this.button("choose", () => actions.select(message));
  }

  update() {
    const { message, root } = this;
    const { content, reasoning } = splitThoughts(message);
    const busy = isBusy(message);
    root.dataset.state = message.state;
    this.#showThoughts(reasoning, busy && content === "");
    this.prose.update(shownText(content, !busy), !busy);
    this.#showCalls(busy);
    this.part("waiting").hidden = !busy || content !== "" || (message.calls?.length ?? 0) > 0;
    this.part("waiting-for").textContent = this.actions.startText();
    this.part("failure").hidden = !message.error;
    this.part("failure-text").textContent = message.error ?? "";
    this.part("meta").hidden = busy;
    this.part("stats").textContent = summary(message);
    this.part("stats").disabled = !message.stats;
    this.part("again").hidden = Boolean(message.error);
    this.part("resume").hidden = !(content && (message.finish === "length" || message.state === "stopped" || message.error));
    this.part("show-tokens").hidden = !message.tokens?.length;
    const group = this.conversation.group(message);
    const shown = this.conversation.path().includes(message);
    root.classList.toggle("other", group.length > 1 && !shown);
    this.part("model-label").hidden = !message.model || !(group.length > 1 || this.actions.manyModels());
    this.part("model-label").textContent = nameOf({ id: message.model ?? "", server: message.server });
    this.part("choose").hidden = shown;
    this.showAlternatives();
  }

  #showThoughts(reasoning, thinking) {
    this.part("thinking").hidden = reasoning === "";
    if (reasoning === "") return;
    const seconds = this.message.thoughtSeconds;
    const taken = seconds ? ` for ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s` : "";
    this.part("thinking-label").textContent = thinking ? "Thinking…" : `Thought${taken}`;
    this.thoughts.update(reasoning, !thinking);
  }

  #showCalls(busy) {
    const calls = (this.message.calls ?? []).filter(Boolean);
    const state = JSON.stringify([calls, busy]);
    if (state === this.shownCalls) return; // keep a result form that the user is filling in
    this.shownCalls = state;
    this.part("calls").replaceChildren(...calls.map((call) => this.#callView(call, busy)));
  }

  #callView(call, busy) {
    const box = element("div", { class: "call" }, element("p", { class: "call-head" }, "Calls ", element("code", {}, call.name)));
    box.append(element("pre", { tabindex: "0", dir: "ltr" }, pretty(call.arguments)));
    if (call.result !== null) box.append(element("p", { class: "call-result", dir: "auto" }, call.result));
    else if (!busy) box.append(this.#resultForm(call));
    return box;
  }

  #resultForm(call) {
    const input = element("textarea", { rows: "1", "aria-label": `Result of ${call.name}`, placeholder: "The tool’s result" });
    const form = element("form", { class: "result" }, input, element("button", { type: "submit", class: "plain" }, "Submit result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.giveResult(this.message, call, input.value);
    });
    return form;
  }

  toggleTokens() {
    const box = this.part("token-box");
    const shows = box.childElementCount > 0;
    box.replaceChildren(...(shows ? [] : [tokensView(this.message.tokens)]));
    this.part("prose").hidden = !shows;
    this.part("show-tokens").setAttribute("aria-pressed", String(!shows));
  }
}

const pretty = (json) => (isJSON(json, true) ? indented(json) : json);

// An answer that is JSON is shown as code, one that is on a single line in several.
function shownText(content, done) {
  if (!isJSON(content, done)) return content;
  const long = done && !content.trim().includes("\n");
  return fenced(long ? indented(content) : content, "json", done);
}

function summary({ stats, finish, state }) {
  const parts = [];
  if (stats) {
    parts.push(`${number(stats.tokens)} token${stats.tokens === 1 ? "" : "s"}`);
    if (stats.tokens > 2 && stats.decodeRate) parts.push(`${rate(stats.decodeRate)} tokens/s`);
    parts.push(`first token after ${(stats.firstToken / 1000).toFixed(2)} s`);
  }
  if (finish === "length") parts.push("reached the token limit");
  if (state === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

// Show all statistics of an answer in a panel below the button.
function showFigures(button, { stats }) {
  const rows = [
    ["Time to first token", `${(stats.firstToken / 1000).toFixed(3)} s`],
    ["Queued", stats.queued === null ? "" : `${(stats.queued / 1000).toFixed(3)} s`],
    ["Prefill", stats.prefillRate ? `${rate(stats.prefillRate)} tokens/s` : ""],
    ["Decode", stats.decodeRate ? `${rate(stats.decodeRate)} tokens/s` : ""],
    ["Prompt", `${number(stats.prompt)} tokens`],
    ["of which cached", number(stats.cached)],
    ["Answer", `${number(stats.tokens)} tokens`],
    ["of which reasoning", stats.reasoning ? number(stats.reasoning) : ""],
    ["of which drafts", stats.drafted ? number(stats.drafted) : ""],
  ].filter(([, value]) => value !== "");
  const panel = $("figures");
  panel.querySelector("dl").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  panel.showPopover();
  place(panel, button);
}
