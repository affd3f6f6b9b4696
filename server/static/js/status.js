// Server status: the dot in the header, and the panel that it opens.
import { listModels, readiness, readMetrics } from "./api.js";
import { $, element, shortName } from "./dom.js";

const LOOK = { ready: 15_000, waiting: 2_000 }; // milliseconds between health checks
const SAMPLE = 2_000; // milliseconds between metrics requests while the panel is open
const SPAN = 240_000; // milliseconds covered by the plot

const WORDS = { offline: "server not reachable", locked: "needs an API key", dead: "engine not running" };

export class Status {
  kind = "connecting";
  #timer = 0;
  #samples = []; // { at, generated, prompt }: token counters
  #sampling = 0;
  #cards = [];

  /** Callbacks: `connected(cards)` with the models, `locked(reason)` if a key is required, `context()`: tokens or null. */
  constructor({ connected, locked, context }) {
    Object.assign(this, { connected, locked, context });
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
    $("open-status").addEventListener("click", () => this.open());
    $("status").addEventListener("close", () => clearTimeout(this.#sampling));
    $("status").addEventListener("click", (event) => event.target === $("status") && $("status").close());
  }

  get maxLength() {
    return this.#cards[0]?.max_model_len ?? null;
  }

  /** Check the server now, and periodically while the page is visible. */
  async look() {
    clearTimeout(this.#timer);
    try {
      const { ok, state } = await readiness();
      if (!ok) this.#set(state.phase === "dead" ? "offline" : "waiting", phaseText(state));
      else if (this.kind !== "ready") await this.#connect();
      else this.#set("ready", this.#name());
    } catch (error) {
      this.#set(error.status === 401 ? "locked" : "offline", error.status === 401 ? WORDS.locked : WORDS.offline);
      if (error.status === 401) this.locked(error.message);
    }
    if (document.hidden || this.kind === "locked") return;
    // Also sample while the panel is closed, so that its plot has data when it opens.
    if (this.kind === "ready" && !$("status").open) this.#read().catch(() => {});
    this.#timer = setTimeout(() => this.look(), this.kind === "ready" ? LOOK.ready : LOOK.waiting);
  }

  /** Reconnect after the server failed to answer or the key changed. */
  doubt() {
    this.kind = "connecting";
    return this.look();
  }

  async #connect() {
    this.#cards = await listModels();
    this.connected(this.#cards);
    this.#set("ready", this.#name());
  }

  #name() {
    return shortName(this.#cards[0]?.id ?? "");
  }

  #set(kind, text) {
    this.kind = kind;
    $("status-dot").dataset.status = kind;
    $("status-text").textContent = kind === "ready" ? "ready" : text;
    $("model-name").textContent = text;
    const several = kind === "ready" && this.#cards.length > 1;
    $("model-name").hidden = several;
    $("model-select").hidden = !several;
    $("phase").textContent = kind === "ready" ? "Ready" : text;
  }

  // ---- the panel ----

  open() {
    $("status").showModal();
    this.#sample();
  }

  async #sample() {
    clearTimeout(this.#sampling);
    try {
      this.#draw(await this.#read());
    } catch (error) {
      $("status-note").textContent = error.message;
    }
    if ($("status").open) this.#sampling = setTimeout(() => this.#sample(), SAMPLE);
  }

  async #read() {
    const read = { at: performance.now(), ...parseMetrics(await readMetrics()) };
    this.#samples = [...this.#samples.filter(({ at }) => at > read.at - SPAN), read];
    return read;
  }

  async #draw(read) {
    const rates = ratesOf(this.#samples);
    const context = await this.context();
    const most = this.maxLength;
    const of = (value) => (value === undefined ? "–" : value.toLocaleString("en"));
    const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)} %` : "–");
    const rows = [
      ["Running", of(read.running)],
      ["Waiting", of(read.waiting)],
      ["KV cache in use", percent(read.kvUse)],
      ["Prefix cache hits", percent(read.hits / read.queries)],
      ["Generated", `${of(Math.round(rates.at(-1)?.generated ?? 0))} tokens/s`],
      ["Prefilled", `${of(Math.round(rates.at(-1)?.prompt ?? 0))} tokens/s`],
      ["Tokens in this chat", context === null ? "–" : `${of(context)}${most ? ` of ${of(most)}` : ""}`],
    ];
    $("status-figures").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    $("status-note").textContent = "";
    drawPlot(rates);
  }
}

// Describe the state from /readyz of an engine that is not ready.
function phaseText({ phase, fraction, seconds_left: left }) {
  if (!phase || phase === "dead") return WORDS.dead;
  const part = typeof fraction === "number" ? ` ${Math.round(100 * fraction)} %` : "";
  const rest = typeof left === "number" ? `, about ${Math.ceil(left)} s left` : "";
  return `${phase}${part}${rest}`;
}

const NAMES = {
  running: "vllm:num_requests_running",
  waiting: "vllm:num_requests_waiting",
  kvUse: "vllm:kv_cache_usage_perc",
  queries: "vllm:prefix_cache_queries_total",
  hits: "vllm:prefix_cache_hits_total",
  generated: "vllm:generation_tokens_total",
  prompt: "vllm:prompt_tokens_total",
};

/** Parse the metrics in NAMES from Prometheus' text format, each summed over its labels. */
export function parseMetrics(text) {
  const read = {};
  for (const [key, name] of Object.entries(NAMES)) {
    for (const [, value] of text.matchAll(new RegExp(`^${name}(?:\\{.*\\})? (\\S+)`, "gm"))) read[key] = (read[key] ?? 0) + Number(value);
  }
  return read;
}

/** Return tokens per second between samples. A decreased counter means that the server restarted. */
export function ratesOf(samples) {
  return samples.slice(1).map((sample, index) => {
    const before = samples[index];
    const seconds = (sample.at - before.at) / 1000;
    const rate = (name) => Math.max(0, ((sample[name] ?? 0) - (before[name] ?? 0)) / seconds);
    return { at: sample.at, generated: rate("generated"), prompt: rate("prompt") };
  });
}

function drawPlot(rates) {
  const most = Math.max(1, ...rates.map(({ generated }) => generated));
  const now = rates.at(-1)?.at ?? 0;
  const points = rates.map(({ at, generated }) => `${240 * (1 - (now - at) / SPAN)},${58 - (54 * generated) / most}`);
  $("plot-line").setAttribute("points", points.join(" "));
  const first = points[0]?.split(",")[0] ?? 240;
  $("plot-area").setAttribute("points", points.length ? `${first},60 ${points.join(" ")} 240,60` : "");
  $("plot-most").textContent = `${Math.round(most).toLocaleString("en")} tokens/s`;
}
