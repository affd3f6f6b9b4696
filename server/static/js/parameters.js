// Controls for the server's parameters, made from its own schema: in groups, with a search.
import { chatParameters } from "./api.js";
import { $, element } from "./dom.js";

// Parameters with their own control, or set by the page itself.
const OWN = new Set(
  ("model messages user tools tool_choice stream stream_options response_format n logprobs top_logprobs prompt_logprobs " +
    "return_token_ids return_tokens_as_token_ids temperature max_tokens max_completion_tokens continue_final_message " +
    "add_generation_prompt request_id include_reasoning use_beam_search length_penalty " +
    "guided_json guided_regex guided_choice guided_grammar").split(" "),
);
// The first group is shown, the others are folded. The last one takes what has no other.
const GROUPS = [
  ["Sampling", "top_p top_k min_p typical_p top_n_sigma xtc_probability xtc_threshold seed"],
  ["Repetition", "presence_penalty frequency_penalty repetition_penalty dry_multiplier dry_base dry_allowed_length dry_sequence_breakers"],
  ["Length and end", "stop stop_token_ids include_stop_str_in_output min_tokens ignore_eos timeout_ms"],
  ["Reasoning and template", "reasoning_effort enable_thinking thinking_token_budget verbosity chat_template_kwargs documents"],
  ["Words and tokens", "bad_words logit_bias allowed_token_ids logprob_token_ids skip_special_tokens add_special_tokens"],
  ["Other", ""],
].map(([title, names]) => [title, names.split(" ")]);

export class Parameters {
  #fields = new Map(); // name → { input, schema, row }
  #groups = []; // { box, count, names }

  /** `set(name, value)`: store a parameter of the conversation; undefined: the model's default. */
  constructor(set) {
    this.set = set;
    $("find-parameter").addEventListener("input", () => this.#find($("find-parameter").value.trim().toLowerCase()));
  }

  /** Make the controls, once. */
  async load() {
    if (this.#fields.size) return;
    try {
      const schemas = await chatParameters();
      const left = new Set(Object.keys(schemas).filter((name) => !OWN.has(name) && controlFor(schemas[name])));
      this.#groups = GROUPS.map(([title, wanted]) => {
        const names = title === "Other" ? [...left] : wanted.filter((name) => left.delete(name));
        return this.#group(title, names, schemas);
      }).filter(({ names }) => names.length > 0);
      $("parameters").replaceChildren(...this.#groups.map(({ box }) => box));
      $("find-parameter").placeholder = `Search ${this.#fields.size} parameters`;
    } catch (error) {
      $("parameters").replaceChildren(element("p", { class: "help error" }, `Cannot load the parameters: ${error.message}`));
    }
  }

  /** Show the values of a conversation. */
  show(values) {
    for (const [name, { input, schema }] of this.#fields) {
      input.setCustomValidity("");
      input.value = written(values[name], schema);
    }
    this.count(values);
  }

  /** Show how many values each group has. */
  count(values) {
    for (const { count, names } of this.#groups) {
      const given = names.filter((name) => values[name] !== undefined).length;
      count.textContent = given ? `${given} set` : "";
    }
  }

  /** Read a control. Returns true if it is one of these. */
  read(input) {
    const { schema } = this.#fields.get(input.dataset.parameter) ?? {};
    if (!schema) return false;
    input.setCustomValidity("");
    try {
      this.set(input.dataset.parameter, read(input.value, schema));
    } catch {
      input.setCustomValidity("This is not valid JSON.");
    }
    input.reportValidity();
    return true;
  }

  #group(title, names, schemas) {
    const count = element("span", { class: "given" });
    const rows = names.map((name) => this.#row(name, schemas[name]));
    const box = element("details", { class: "parameter-group" }, element("summary", {}, title, " ", count), ...rows);
    box.open = title === GROUPS[0][0];
    return { box, count, names };
  }

  #row(name, schema) {
    const input = controlFor(schema);
    input.id = `parameter-${name}`;
    input.dataset.parameter = name;
    input.setAttribute("aria-describedby", `help-${name}`);
    const clear = element("button", { type: "button", class: "clear", "data-clear": name, "aria-label": `Default ${name}` }, "Default");
    const head = element("div", { class: "row-head" }, element("label", { for: input.id }, name), clear);
    const help = element("p", { class: "help", id: `help-${name}` }, schema.description.replace(/`/g, ""));
    const row = element("div", { class: "row" }, head, input, help);
    this.#fields.set(name, { input, schema, row });
    return row;
  }

  #find(text) {
    for (const { box, names } of this.#groups) {
      let found = 0;
      for (const name of names) {
        const { row, schema } = this.#fields.get(name);
        row.hidden = !`${name} ${schema.description}`.toLowerCase().includes(text);
        found += !row.hidden;
      }
      box.hidden = found === 0;
      box.open = text !== "" || box === this.#groups[0].box;
    }
  }
}

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
