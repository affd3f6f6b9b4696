// The models of other servers (--page-servers), with a key for each server that requires one.
import { apiKey, listModels, modelFrom, SERVERS } from "./api.js";
import { $, element, hostOf } from "./dom.js";

export class Others {
  #models = new Map(); // server → its models
  #rows = new Map(); // server → { input, row, problem }

  /** `changed()`: the models are others than before. */
  constructor(changed) {
    this.changed = changed;
    SERVERS.forEach((server, index) => this.#row(server, `key-${index}`));
  }

  /** Return all models, see modelFrom. */
  get models() {
    return SERVERS.flatMap((server) => this.#models.get(server) ?? []);
  }

  /** Ask all servers, or one, for their models. */
  look(server = null) {
    for (const each of server ? [server] : SERVERS) this.#read(each);
  }

  /** Return the id of the server's field for its key, which is then shown. */
  keyField(server) {
    const { input, row } = this.#rows.get(server);
    row.hidden = false;
    return input.id;
  }

  async #read(server) {
    const { row, problem } = this.#rows.get(server);
    try {
      const cards = await listModels(server);
      this.#models.set(server, cards.map((card) => modelFrom(card, server)));
      problem.textContent = "";
    } catch ({ message, status }) {
      problem.textContent = status === 0 ? message : `${hostOf(server)}: ${message}`;
      row.hidden &&= status !== 401;
    }
    this.changed();
  }

  #row(server, id) {
    const problem = element("p", { class: "help error", id: `${id}-error`, role: "status" });
    const input = element("input", { id, type: "password", autocomplete: "off", spellcheck: "false", "aria-describedby": problem.id });
    input.value = apiKey.get(server);
    input.addEventListener("input", (event) => {
      event.stopPropagation(); // it is no setting of the conversation
      apiKey.set(input.value.trim(), server);
    });
    input.addEventListener("change", () => this.look(server));
    const row = element("div", {}, element("label", { for: id }, `API key for ${hostOf(server)}`), input);
    row.hidden = !input.value;
    this.#rows.set(server, { input, row, problem });
    $("others").append(row, problem);
  }
}
