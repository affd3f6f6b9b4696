// Server status: the dot in the header, and the panel that it opens.
import { listModels, readiness, readMetrics } from "./api.js";
import { $, element, shortName } from "./dom.js";

const LOOK = { ready: 5_000, waiting: 1_000 }; // milliseconds between health checks
const TOY = /(^|\/)(quire-demo|configs\/demo|quire\/demo)\/?$/; // names of the bundled model
const SAMPLE = 2_000; // milliseconds between metrics requests while the panel is open
const SPAN = 240_000; // milliseconds covered by the plot

// What the page says for each phase of /readyz, and for what the page itself finds.
const WORDS = {
  starting: "Starting",
  downloading: "Downloading the model",
  loading: "Loading the model",
  profiling: "Measuring memory",
  compiling: "Compiling kernels",
  capturing: "Capturing CUDA graphs",
  restarting: "Restarting",
  asleep: "The model is asleep",
  unresponsive: "The engine does not respond",
  draining: "The server is stopping",
  dead: "The engine has stopped",
  ready: "Ready",
  connecting: "Connecting",
  locked: "Needs an API key",
  offline: "The server cannot be reached",
};

// What a reader is told when an answer failed.
const FAILURES = {
  restarting: "The engine stopped and is restarting. Try again in a moment.",
  waiting: "The server is starting. Try again in a moment.",
  unresponsive: "The engine does not respond. Try again in a moment.",
  draining: "The server is stopping. Try again once it has been started again.",
  dead: "The engine has stopped. Its log says why; start the server again.",
  offline: "The server cannot be reached. Is it still running?",
};
const BROKEN = new Set(["unresponsive", "draining", "dead"]); // other phases lead to "ready"

export class Status {
  kind = "connecting";
  text = WORDS.connecting; // the state in words
  #timer = 0;
  #waiting = 0; // number of questions that wait for the start
  #state = {}; // the engine's, from /readyz
  #samples = []; // { at, generated, prompt }: token counters
  #sampling = 0;
  #cards = [];

  /**
   * Callbacks: `connected(cards)` with the models, `locked(reason)` if a key is required, `context()`: tokens or null,
   * `changed()` when the state or its text has changed.
   */
  constructor({ connected, locked, context, changed }) {
    Object.assign(this, { connected, locked, context, changed });
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
      this.#state = state;
      if (!ok) this.#set(BROKEN.has(state.phase) ? "offline" : "waiting", phaseText(state), state.fraction);
      else if (this.kind !== "ready") await this.#connect();
    } catch (error) {
      this.#state = {};
      const kind = error.status === 401 ? "locked" : "offline";
      this.#set(kind, WORDS[kind]);
      if (error.status === 401) this.locked(error.message);
    }
    if ((document.hidden && !this.#waiting) || this.kind === "locked") return;
    // Also sample while the panel is closed, so that its plot has data when it opens.
    if (this.kind === "ready" && !$("status").open) this.#read().catch(() => {});
    clearTimeout(this.#timer); // of another look at the same time
    this.#timer = setTimeout(() => this.look(), this.kind === "ready" ? LOOK.ready : LOOK.waiting);
  }

  /** Reconnect after the server failed to answer or the key changed. */
  doubt() {
    this.kind = "connecting";
    return this.look();
  }

  /** Look at the server after a request failed. Returns what a reader should know about it, or null if it is ready. */
  async explain() {
    await this.doubt();
    const { phase, num_restarts: restarts } = this.#state;
    if (this.kind === "waiting") return restarts ? FAILURES.restarting : FAILURES.waiting;
    return this.kind === "offline" ? (FAILURES[phase] ?? FAILURES.offline) : null;
  }

  /** Wait until the server has started, cannot be reached, or `signal` aborts. */
  async started(signal) {
    this.#waiting += 1;
    while (["connecting", "waiting"].includes(this.kind) && !signal.aborted) {
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
    this.#waiting -= 1;
  }

  async #connect() {
    this.#cards = await listModels();
    this.#set("ready", WORDS.ready);
    this.connected(this.#cards);
  }

  /** `fraction`: the completed part of the phase, if known. */
  #set(kind, text, fraction = null) {
    Object.assign(this, { kind, text });
    $("status-dot").dataset.status = kind;
    $("status-dot").classList.toggle("lost", kind === "waiting" && this.#state.num_restarts > 0);
    $("status-text").textContent = $("phase").textContent = $("start-text").textContent = text;
    $("model-name").textContent = kind === "ready" ? shortName(this.#cards[0]?.id ?? "") : text;
    this.showChoice();
    $("start").hidden = kind !== "waiting";
    if (fraction === null) $("start-progress").removeAttribute("value");
    else $("start-progress").value = fraction;
    $("toy").hidden = kind !== "ready" || !TOY.test(this.#cards[0]?.id ?? "");
    this.changed();
  }

  /** Show the choice of models instead of the name if there are several. */
  showChoice() {
    const several = this.kind === "ready" && $("model-select").length > 1;
    $("model-name").hidden = several;
    $("model-select").hidden = !several;
  }

  // ---- the panel ----

  open() {
    $("status").showModal();
    this.#sample();
  }

  async #sample() {
    clearTimeout(this.#sampling);
    try {
      const read = await this.#read();
      this.#draw(read, await this.context());
      $("status-note").textContent = "";
    } catch (error) {
      this.#draw({}, null);
      $("status-note").textContent = error.message;
    }
    const soon = this.#samples.length < 2; // a rate needs two
    if ($("status").open) this.#sampling = setTimeout(() => this.#sample(), soon ? SAMPLE / 4 : SAMPLE);
  }

  async #read() {
    const read = { at: performance.now(), ...parseMetrics(await readMetrics()) };
    this.#samples = [...this.#samples.filter(({ at }) => at > read.at - SPAN), read];
    return read;
  }

  /** `read`: the newest sample, {} if the server is gone. `context`: tokens of the conversation or null. */
  #draw(read, context) {
    const rates = ratesOf(this.#samples);
    const newest = read.at === rates.at(-1)?.at ? rates.at(-1) : {};
    const most = this.maxLength;
    const of = (value) => (value === undefined ? "–" : value.toLocaleString("en"));
    const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(1)} %` : "–");
    const rate = (value) => (value === undefined ? "–" : `${of(Math.round(value))} tokens/s`);
    const { num_restarts: restarts, last_loss: loss } = this.#state;
    const rows = [
      ["Running", of(read.running)],
      ["Waiting", of(read.waiting)],
      ["KV cache in use", percent(read.kvUse)],
      ["Prefix cache hits", percent(read.hits / read.queries)],
      ...(read.drafts ? [["Drafts accepted", percent(read.accepted / read.drafts)]] : []),
      ...(read.images ? [["Images sent before", percent(read.known / read.images)]] : []),
      ...(read.misses?.length ? [["Prompts not cached", missText(read.misses)]] : []),
      ["Generated", rate(newest.generated)],
      ["Prefilled", rate(newest.prompt)],
      ["Tokens in this chat", context === null ? "–" : `${of(context)}${most ? ` of ${of(most)}` : ""}`],
      ...(restarts ? [["Engine restarts", `${of(restarts)}${loss ? `, last: ${loss}` : ""}`]] : []),
    ];
    $("status-figures").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    drawPlot(rates);
  }
}

// Describe the state from /readyz of an engine that is not ready.
function phaseText({ phase = "starting", fraction, seconds_left: left, num_restarts: restarts }) {
  const again = restarts && phase !== "restarting" && !BROKEN.has(phase) ? `${WORDS.restarting}: ` : "";
  const part = typeof fraction === "number" ? ` ${Math.round(100 * fraction)} %` : "";
  const rest = typeof left === "number" ? `, about ${timeText(left)} left` : "";
  return `${again}${WORDS[phase] ?? phase}${part}${rest}`;
}

const timeText = (seconds) => (seconds < 100 ? `${Math.ceil(seconds)} s` : `${Math.round(seconds / 60)} min`);

const NAMES = {
  running: "vllm:num_requests_running",
  waiting: "vllm:num_requests_waiting",
  kvUse: "vllm:kv_cache_usage_perc",
  queries: "vllm:prefix_cache_queries_total",
  hits: "vllm:prefix_cache_hits_total",
  drafts: "vllm:spec_decode_num_draft_tokens_total",
  accepted: "vllm:spec_decode_num_accepted_tokens_total",
  images: "vllm:mm_cache_queries_total",
  known: "vllm:mm_cache_hits_total",
  generated: "vllm:generation_tokens_total",
  prompt: "vllm:prompt_tokens_total",
};

/** Parse the metrics in NAMES from Prometheus' text format, each summed over its labels. */
export function parseMetrics(text) {
  const read = {};
  for (const [key, name] of Object.entries(NAMES)) {
    for (const [, value] of text.matchAll(new RegExp(`^${name}(?:\\{.*\\})? (\\S+)`, "gm"))) read[key] = (read[key] ?? 0) + Number(value);
  }
  read.misses = parseMisses(text);
  return read;
}

// Why the prefix cache held no more of a prompt.
const MISSES = {
  not_seen: "new text",
  other_tokens: "changed text",
  no_state: "no state kept",
  evicted: "evicted",
  other_salt: "other salt",
  not_read: "not read",
  disabled: "no cache",
};

/** Parse the requests whose prompt was not cached to its end: [reason, count], most frequent first. */
function parseMisses(text) {
  const counts = {};
  for (const [, reason, value] of text.matchAll(/^quire:prefix_misses_total\{.*reason="(\w+)".*\} (\S+)/gm)) {
    counts[reason] = (counts[reason] ?? 0) + Number(value);
  }
  return Object.entries(counts).filter(([, count]) => count).sort(([, a], [, b]) => b - a);
}

const missText = (misses) =>
  misses.map(([reason, count]) => `${count.toLocaleString("en")} ${MISSES[reason] ?? reason.replaceAll("_", " ")}`).join(", ");

/** Return tokens/s between samples: { from, at, generated, prompt }. A decreased counter: the server restarted. */
export function ratesOf(samples) {
  return samples.slice(1).map((sample, index) => {
    const before = samples[index];
    const seconds = (sample.at - before.at) / 1000;
    const rate = (name) => Math.max(0, ((sample[name] ?? 0) - (before[name] ?? 0)) / seconds);
    return { from: before.at, at: sample.at, generated: rate("generated"), prompt: rate("prompt") };
  });
}

function drawPlot(rates) {
  const most = Math.max(0, ...rates.map(({ generated }) => generated));
  const now = performance.now();
  const point = (at, rate) => `${240 * (1 - (now - at) / SPAN)},${58 - (54 * rate) / Math.max(1, most)}`;
  const points = rates.flatMap(({ from, at, generated }) => [point(from, generated), point(at, generated)]);
  $("plot-line").setAttribute("points", points.join(" "));
  const first = points[0]?.split(",")[0] ?? 240;
  const last = points.at(-1)?.split(",")[0];
  $("plot-area").setAttribute("points", points.length ? `${first},60 ${points.join(" ")} ${last},60` : "");
  $("plot-most").textContent = `${Math.round(most).toLocaleString("en")} tokens/s`;
}
