// Conversation settings (system prompt, sampling, answer format, tools, models), the API key and the theme.
import { apiKey, chatParameters } from "./api.js";
import { $, element, load, save, shortName, toast } from "./dom.js";
import { parseTools } from "./tools.js";

const DEFAULTS = "quire.settings";
// Parameters with their own control, or set by the page itself.
const OWN = new Set(
  ("model messages user tools tool_choice stream stream_options response_format n logprobs top_logprobs prompt_logprobs " +
    "return_token_ids return_tokens_as_token_ids temperature max_tokens max_completion_tokens continue_final_message " +
    "add_generation_prompt request_id include_reasoning use_beam_search length_penalty " +
    "guided_json guided_regex guided_choice guided_grammar").split(" "),
);
const FIRST = ["top_p", "top_k", "min_p", "seed", "stop", "reasoning_effort", "enable_thinking", "presence_penalty"];

/** Return the settings of a new conversation. */
export function defaultSettings() {
  return load(DEFAULTS, {});
}

export class Settings {
  #conversation = null;
  #fields = null; // the server's other parameters: name → { input, schema }

  /** Callbacks: `changed()` for the conversation's settings, `keyChanged()` for the API key. */
  constructor({ changed, keyChanged }) {
    this.changed = changed;
    const dialog = $("settings");
    dialog.addEventListener("input", (event) => this.#read(event.target));
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // the backdrop
    dialog.addEventListener("close", () => {
      if (this.keyAtOpening !== apiKey.get()) keyChanged();
    });
    $("reset").addEventListener("click", () => this.#reset());
    $("keep-settings").addEventListener("click", () => {
      save(DEFAULTS, this.#conversation.settings);
      toast("New chats start with these settings.");
    });
    for (const button of document.querySelectorAll("[data-set-theme]")) {
      button.addEventListener("click", () => this.#setTheme(button.dataset.setTheme));
    }
    $("parameters").parentElement.addEventListener("toggle", () => this.#loadParameters());
    this.#setTheme(document.documentElement.dataset.theme);
  }

  show(conversation) {
    this.#conversation = conversation;
    if ($("settings").open) this.#draw();
  }

  open(focus = null) {
    this.keyAtOpening = apiKey.get();
    $("key-row").hidden &&= apiKey.get() === "";
    this.#draw();
    if (!$("settings").open) $("settings").showModal();
    if (focus) $(focus).focus();
  }

  askForKey(reason) {
    $("key-row").hidden = false;
    $("key-error").textContent = apiKey.get() ? reason : "";
    $("api-key").setAttribute("aria-invalid", String(apiKey.get() !== ""));
    return this.open("api-key");
  }

  keyAccepted() {
    $("key-error").textContent = "";
    $("api-key").setAttribute("aria-invalid", "false");
  }

  showModels(cards) {
    const chosen = () => this.#conversation.settings.models ?? [];
    const boxes = cards.map(({ id }) => {
      const box = element("input", { type: "checkbox", name: "compare", value: id });
      box.checked = chosen().includes(id);
      return element("label", { class: "check" }, box, ` ${shortName(id)}`);
    });
    $("compare").replaceChildren(...boxes);
    $("compare-row").hidden = cards.length < 2;
    const length = cards[0]?.max_model_len;
    $("max-tokens-help").textContent = length ? `The context holds ${length.toLocaleString("en")} tokens: the conversation and the answer together.` : "";
  }

  #draw() {
    const { settings } = this.#conversation;
    const { temperature, max_tokens: maxTokens } = settings.parameters ?? {};
    $("system").value = settings.system ?? "";
    $("temperature").value = temperature ?? 1;
    $("temperature").classList.toggle("unset", temperature === undefined);
    $("temperature-value").textContent = temperature?.toFixed(2) ?? "model default";
    $("max-tokens").value = maxTokens ?? "";
    $("schema").value = settings.schema ?? "";
    $("logprobs").checked = Boolean(settings.logprobs);
    $("demo-tools").checked = Boolean(settings.demoTools);
    $("tools").value = settings.tools ?? "";
    $("api-key").value = apiKey.get();
    for (const box of document.getElementsByName("compare")) box.checked = (settings.models ?? []).includes(box.value);
    for (const [name, field] of this.#fields ?? []) field.input.value = written(settings.parameters?.[name], field.schema);
    this.#check();
  }

  #read(target) {
    const { settings } = this.#conversation;
    if (target === $("api-key")) return apiKey.set(target.value.trim());
    if (target === $("system")) settings.system = target.value;
    if (target === $("schema")) settings.schema = target.value;
    if (target === $("tools")) settings.tools = target.value;
    if (target === $("logprobs")) settings.logprobs = target.checked;
    if (target === $("demo-tools")) settings.demoTools = target.checked;
    if (target.name === "compare") settings.models = [...document.getElementsByName("compare")].filter((box) => box.checked).map((box) => box.value);
    if (target === $("temperature")) this.#set("temperature", Number(target.value));
    if (target === $("max-tokens")) this.#set("max_tokens", target.valueAsNumber > 0 ? Math.floor(target.valueAsNumber) : undefined);
    if (target.dataset.parameter) this.#readParameter(target);
    if (target === $("temperature")) this.#draw();
    this.#check();
    return this.changed();
  }

  #set(name, value) {
    const { settings } = this.#conversation;
    settings.parameters = { ...settings.parameters, [name]: value };
    if (value === undefined) delete settings.parameters[name];
  }

  #readParameter(input) {
    const { schema } = this.#fields.get(input.dataset.parameter);
    input.setCustomValidity("");
    try {
      this.#set(input.dataset.parameter, read(input.value, schema));
    } catch {
      input.setCustomValidity("This is not valid JSON.");
    }
    input.reportValidity();
  }

  // Report invalid JSON immediately, not when a message is sent.
  #check() {
    for (const [id, parse] of [["schema", JSON.parse], ["tools", parseTools]]) {
      let error = "";
      try {
        if ($(id).value.trim()) parse($(id).value);
      } catch (thrown) {
        error = `Not valid JSON: ${thrown.message}`;
      }
      $(`${id}-error`).textContent = error;
      $(id).setAttribute("aria-invalid", String(error !== ""));
    }
  }

  #reset() {
    this.#conversation.meta.settings = {};
    this.#draw();
    this.changed();
  }

  async #loadParameters() {
    if (this.#fields) return;
    try {
      const schemas = await chatParameters();
      this.#fields = new Map();
      const names = Object.keys(schemas).filter((name) => !OWN.has(name) && controlFor(schemas[name]));
      names.sort((a, b) => (FIRST.indexOf(a) + 1 || 99) - (FIRST.indexOf(b) + 1 || 99));
      $("parameters").replaceChildren(...names.map((name) => this.#field(name, schemas[name])));
      this.#draw();
    } catch (error) {
      $("parameters").replaceChildren(element("p", { class: "help" }, `Cannot load the parameters: ${error.message}`));
    }
  }

  #field(name, schema) {
    const input = controlFor(schema);
    input.id = `parameter-${name}`;
    input.dataset.parameter = name;
    input.setAttribute("aria-describedby", `help-${name}`);
    this.#fields.set(name, { input, schema });
    const help = element("p", { class: "help", id: `help-${name}` }, schema.description.replace(/`/g, ""));
    return element("div", { class: "row" }, element("label", { for: input.id }, name), input, help);
  }

  #setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("quire.theme", theme);
    } catch {
      // The browser blocks storage: the theme is that of this page alone.
    }
    for (const button of document.querySelectorAll("[data-set-theme]")) {
      button.setAttribute("aria-pressed", String(button.dataset.setTheme === theme));
    }
  }
}

// ---- controls made from the server's own schema --------------------------------------------------------------------

const typesOf = ({ type, enum: values, anyOf = [] }) => {
  const kinds = anyOf.map((each) => (each.enum ? "enum" : each.type));
  return [values ? "enum" : type, ...kinds].filter((kind) => kind && kind !== "null");
};
const isList = (schema) => typesOf(schema).includes("array");
const isNumber = (schema) => typesOf(schema).every((kind) => kind === "number" || kind === "integer");
const holdsTexts = ({ anyOf = [] }) => anyOf.some((each) => each.type === "array" && each.items?.type === "string");

/** Return a control for a parameter, or null if it is not for users. */
function controlFor(schema) {
  const types = typesOf(schema);
  if (/^(Accepted; has no effect|Not supported)/.test(schema.description ?? "") || !types.length) return null;
  const standard = schema.default === undefined ? "default" : `default: ${schema.default}`;
  if (types[0] === "boolean") return choice(["true", "false"], standard);
  if (types[0] === "enum") return choice(schema.anyOf.find((each) => each.enum).enum, standard);
  if (isNumber(schema)) {
    const range = { min: schema.minimum ?? schema.exclusiveMinimum, max: schema.maximum };
    const limits = Object.fromEntries(Object.entries(range).filter(([, value]) => Math.abs(value) < 2 ** 53).map(([key, value]) => [key, String(value)]));
    return element("input", { type: "number", step: types[0] === "integer" ? "1" : "any", placeholder: standard, ...limits });
  }
  const placeholder = holdsTexts(schema) ? "one per line" : isList(schema) || types[0] === "object" ? "JSON" : standard;
  return element(types[0] === "string" && !isList(schema) ? "input" : "textarea", { placeholder, rows: "1", spellcheck: "false" });
}

const choice = (values, standard) =>
  element("select", {}, new Option(standard, ""), ...values.map((value) => new Option(value, value)));

function read(text, schema) {
  const [type] = typesOf(schema);
  if (text.trim() === "") return undefined;
  if (type === "boolean") return text === "true";
  if (isNumber(schema)) return Number(text);
  if (holdsTexts(schema)) return text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  return isList(schema) || type === "object" ? JSON.parse(text) : text;
}

function written(value, schema) {
  if (value === undefined) return "";
  if (Array.isArray(value) && holdsTexts(schema)) return value.map((line) => line.replaceAll("\n", "\\n")).join("\n");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
