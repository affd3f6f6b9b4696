// Conversation settings (system prompt, sampling, answer format, tools, models), the API key and the theme.
import { apiKey, SERVERS } from "./api.js";
import { $, element, load, nameOf, save, toast } from "./dom.js";
import { Parameters } from "./parameters.js";
import { Presets } from "./presets.js";
import { checkSchema, parseJSON } from "./schemas.js";
import { parseTools } from "./tools.js";

const DEFAULTS = "quire.settings";

/** Return the settings of a new conversation. */
export function defaultSettings() {
  return load(DEFAULTS, {});
}

export class Settings {
  #conversation = null;
  #parameters = new Parameters((name, value) => this.#set(name, value));
  #presets = new Presets({ current: () => this.#conversation, use: (...all) => this.#replace(...all) });

  /** Callbacks: `changed(conversation)` for its settings, `keyChanged()` for the API key, `opened()`. */
  constructor({ changed, keyChanged, opened }) {
    Object.assign(this, { changed, opened });
    const dialog = $("settings");
    dialog.addEventListener("input", (event) => this.#read(event.target));
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // the backdrop
    dialog.addEventListener("click", ({ target }) => target.dataset.clear && this.#clear(target));
    dialog.addEventListener("close", () => {
      if (this.keyAtOpening !== apiKey.get()) keyChanged();
    });
    $("reset").addEventListener("click", () => this.#reset());
    $("keep-settings").addEventListener("click", () => {
      const before = load(DEFAULTS, undefined);
      save(DEFAULTS, this.#conversation.settings);
      toast("New chats start with these settings.", "Undo", () => save(DEFAULTS, before));
    });
    for (const button of document.querySelectorAll("[data-set-theme]")) {
      button.addEventListener("click", () => this.#setTheme(button.dataset.setTheme));
    }
    $("parameters").parentElement.addEventListener("toggle", async () => {
      await this.#parameters.load();
      this.#draw();
    });
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
    if (!$("settings").open) {
      $("settings").showModal();
      this.opened();
    }
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

  /** `models`: { key, id, server }. */
  showModels(models) {
    const chosen = this.#conversation.settings.models ?? [];
    const boxes = models.map((model) => {
      const box = element("input", { type: "checkbox", name: "compare", value: model.key });
      box.checked = chosen.includes(model.key);
      return element("label", { class: "check" }, box, ` ${nameOf(model)}`);
    });
    $("compare").replaceChildren(...boxes);
    $("compare-row").hidden = models.length < 2 && !SERVERS.length;
  }

  showContext(length) {
    $("max-tokens-help").textContent = length ? `The context holds ${length.toLocaleString("en")} tokens: the conversation and the answer together.` : "";
  }

  #draw() {
    const { settings } = this.#conversation;
    this.#presets.show();
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
    this.#parameters.show(settings.parameters ?? {});
    this.#check();
    this.#showCleared();
  }

  #read(target) {
    const { settings } = this.#conversation;
    if (target === $("api-key")) return apiKey.set(target.value.trim());
    if (target.matches("#preset, #preset-name, #find-parameter")) return null;
    if (target === $("system")) settings.system = target.value;
    if (target === $("schema")) settings.schema = target.value;
    if (target === $("tools")) settings.tools = target.value;
    if (target === $("logprobs")) settings.logprobs = target.checked;
    if (target === $("demo-tools")) settings.demoTools = target.checked;
    if (target.name === "compare") settings.models = [...document.getElementsByName("compare")].filter((box) => box.checked).map((box) => box.value);
    if (target === $("temperature")) this.#set("temperature", Number(target.value));
    if (target === $("max-tokens")) this.#set("max_tokens", target.valueAsNumber > 0 ? Math.floor(target.valueAsNumber) : undefined);
    if (target === $("temperature")) this.#draw();
    else if (!this.#parameters.read(target)) this.#check();
    this.#parameters.count(settings.parameters ?? {});
    this.#showCleared();
    return this.changed(this.#conversation);
  }

  /** Return a parameter to the model's default. */
  #clear(button) {
    this.#set(button.dataset.clear, undefined);
    this.#draw();
    button.closest(".row").querySelector("input, select, textarea").focus();
    this.changed(this.#conversation);
  }

  // A parameter that is set has a button for its default.
  #showCleared() {
    const given = this.#conversation.settings.parameters ?? {};
    for (const button of $("settings").querySelectorAll("[data-clear]")) button.hidden = given[button.dataset.clear] === undefined;
    const count = Object.keys(given).length;
    $("parameters-set").textContent = count ? `${count} set` : "";
  }

  #set(name, value) {
    const { settings } = this.#conversation;
    settings.parameters = { ...settings.parameters, [name]: value };
    if (value === undefined) delete settings.parameters[name];
  }

  // Report what is wrong immediately, not when a message is sent.
  #check() {
    for (const [id, check] of [["schema", (text) => checkSchema(parseJSON(text))], ["tools", parseTools]]) {
      let error = "";
      try {
        if ($(id).value.trim()) check($(id).value);
      } catch (thrown) {
        error = thrown.message;
      }
      $(`${id}-error`).textContent = error;
      $(id).setAttribute("aria-invalid", String(error !== ""));
    }
  }

  // Reset everything but the system prompt, which is the user's own text.
  #reset() {
    const conversation = this.#conversation;
    const before = conversation.settings;
    this.#replace(conversation, before.system ? { system: before.system } : {});
    toast("All settings but the system prompt were reset.", "Undo", () => this.#replace(conversation, before));
  }

  #replace(conversation, settings) {
    conversation.meta.settings = structuredClone(settings);
    this.#draw();
    this.changed(conversation);
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
