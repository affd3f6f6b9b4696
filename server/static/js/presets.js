// Presets: settings of a conversation under a name, stored in this browser.
import { $, load, save, toast } from "./dom.js";

const PRESETS = "quire.presets";

export class Presets {
  /** `current()`: the open conversation; `use(conversation, settings)`: replace its settings. */
  constructor({ current, use }) {
    Object.assign(this, { current, use });
    $("preset").addEventListener("change", () => this.#choose($("preset").value));
    $("save-preset").addEventListener("click", () => this.#ask());
    $("delete-preset").addEventListener("click", () => this.#delete());
    $("preset-name").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // of the dialog
      if (event.key === "Enter") this.#save();
      $("preset-name").hidden = true;
      $("save-preset").focus();
    });
  }

  /** Show the presets, and which one the conversation uses. */
  show() {
    const names = Object.keys(load(PRESETS, {})).sort();
    const chosen = this.current().settings.preset ?? "";
    $("preset").replaceChildren(new Option("None", ""), ...names.map((name) => new Option(name, name, false, name === chosen)));
    $("delete-preset").hidden = !names.includes(chosen);
    $("preset-name").hidden = true;
  }

  #choose(name) {
    const conversation = this.current();
    const before = conversation.settings;
    this.use(conversation, name ? { ...load(PRESETS, {})[name], preset: name } : withoutName(before));
    if (name) toast(`This conversation has the settings of “${name}”.`, "Undo", () => this.use(conversation, before));
  }

  #ask() {
    $("preset-name").hidden = false;
    $("preset-name").value = this.current().settings.preset ?? "";
    $("preset-name").select();
  }

  #save() {
    const name = $("preset-name").value.trim();
    if (!name) return;
    const conversation = this.current();
    save(PRESETS, { ...load(PRESETS, {}), [name]: withoutName(conversation.settings) });
    this.use(conversation, { ...conversation.settings, preset: name });
  }

  #delete() {
    const all = load(PRESETS, {});
    const { [this.current().settings.preset]: deleted, ...others } = all;
    save(PRESETS, others);
    this.show();
    toast("Deleted the preset.", "Undo", () => {
      save(PRESETS, all);
      this.show();
    });
  }
}

function withoutName({ preset, ...settings }) {
  return settings;
}
