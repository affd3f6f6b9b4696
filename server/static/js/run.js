// Streams one answer into a message, with its timings and finish reason.
import { ApiError, streamChat } from "./api.js";

const SAVE_EVERY = 1000; // milliseconds between saves: the most that a closed page loses

/**
 * Fills `message` from the server. `changed()` is called for each piece, `save()` at most every second and at the end,
 * and `explain()` when the server failed: it resolves to what to tell the reader instead of the server's words, or null.
 */
export class Run {
  #controller = new AbortController();
  #clock = { start: performance.now(), first: 0, last: 0, thought: 0 };
  #usage = null;
  #metrics = null;
  #saved = performance.now();
  #thinking = false;

  constructor(message, { changed, save, explain }) {
    this.message = message;
    Object.assign(this, { changed, save, explain });
  }

  stop() {
    this.#controller.abort();
  }

  get signal() {
    return this.#controller.signal;
  }

  /**
   * Stream the answer to the request that `body()` returns or resolves to. Never throws: an error is stored in the
   * message. Returns the error for the page to act on, or null.
   */
  async write(body, resume = false) {
    const { message } = this;
    const fresh = resume ? {} : { content: "", reasoning: "", calls: [], tokens: [], thoughtSeconds: null };
    Object.assign(message, { ...fresh, state: "waiting", error: null, finish: null, stats: null, beat: Date.now() });
    this.changed();
    let failure = null;
    try {
      this.save();
      for await (const piece of streamChat(await body(), this.signal, message.server)) this.#add(piece);
      this.#checkEnd();
      message.state = "done";
    } catch (error) {
      const stopped = this.signal.aborted;
      if (!stopped) failure = await this.#fail(error);
      message.state = stopped ? "stopped" : "failed";
    }
    message.stats = this.#statistics();
    this.#tidy();
    this.changed();
    await this.save();
    return failure;
  }

  #add({ text, reasoning, calls, logprobs, finish, usage, metrics }) {
    const { message } = this;
    message.content += text;
    message.reasoning += reasoning;
    message.finish = finish ?? message.finish;
    this.#usage = usage ?? this.#usage;
    this.#metrics = metrics ?? this.#metrics;
    for (const call of calls) this.#addCall(call);
    for (const { token, logprob, top_logprobs: top } of logprobs) {
      message.tokens.push([token, logprob, top.map((each) => [each.token, each.logprob])]);
    }
    if (!text && !reasoning && !calls.length) return;
    this.#tick(reasoning !== "" || this.#thinksInText());
    message.state = "streaming";
    this.changed();
  }

  // Runs for every piece, so it looks at the newest text only.
  #thinksInText() {
    const { content } = this.message;
    if (content.length < 100) this.#thinking = /^\s*<think>/.test(content) && !content.includes("</think>");
    else if (this.#thinking) this.#thinking = !content.slice(-100).includes("</think>");
    return this.#thinking;
  }

  // The first piece of a call has its id and name; its arguments arrive in pieces.
  #addCall({ index, id, function: { name, arguments: text } }) {
    const call = (this.message.calls[index] ??= { id, name, arguments: "", result: null });
    call.arguments += text ?? "";
  }

  #tick(thinking) {
    const now = performance.now();
    this.#clock.first ||= now;
    this.#clock.last = now;
    if (thinking) this.message.thoughtSeconds = (now - this.#clock.first) / 1000;
    if (now - this.#saved < SAVE_EVERY) return;
    this.#saved = now;
    this.message.beat = Date.now();
    this.save();
  }

  #checkEnd() {
    const { finish } = this.message;
    if (finish === null) throw new ApiError("The answer ended before it was complete.", 500);
    if (finish === "abort") throw new ApiError("The server ended this request early.", 500);
    if (finish === "error") throw new ApiError("The server failed while generating this answer.", 500);
  }

  async #fail(error) {
    const told = error instanceof ApiError ? error.message : `Settings: ${error.message}`;
    const servers = error.status === 0 || error.status >= 500;
    this.message.error = servers ? ((await this.explain()) ?? sentence(told)) : told;
    return error;
  }

  #tidy() {
    const { message } = this;
    const parts = splitThoughts(message);
    Object.assign(message, { content: parts.content, reasoning: parts.reasoning });
    message.calls = message.calls?.filter(Boolean);
    if (!message.tokens?.length) delete message.tokens;
  }

  // The server's measurements, otherwise the page's. Times are in milliseconds.
  #statistics() {
    const usage = this.#usage;
    if (!usage?.completion_tokens) return null;
    const { start, first, last } = this.#clock;
    const measured = this.#metrics ?? {};
    const prompt = usage.prompt_tokens;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const decoding = (last - first) / 1000;
    return {
      tokens: usage.completion_tokens,
      reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
      prompt,
      cached,
      drafted: measured.accepted_draft_tokens,
      firstToken: measured.time_to_first_token_ms ?? first - start,
      queued: measured.queue_time_ms ?? null,
      prefillRate: measured.prefill_time_ms ? (1000 * (prompt - cached)) / measured.prefill_time_ms : null,
      decodeRate: measured.tokens_per_second || (decoding > 0 ? (usage.completion_tokens - 1) / decoding : 0),
    };
  }
}

// Servers' messages begin in lower case.
const sentence = (text) => `${text[0]?.toUpperCase() ?? ""}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

/** Return text and reasoning. Reasoning that the server does not parse is in the text, as <think>…</think>. */
export function splitThoughts({ content, reasoning = "" }) {
  const opened = content.match(/^\s*<think>/);
  if (!opened) return { content, reasoning };
  const close = content.indexOf("</think>");
  const inner = content.slice(opened[0].length, close < 0 ? undefined : close).trim();
  return { content: close < 0 ? "" : content.slice(close + 8).trimStart(), reasoning: reasoning + inner };
}
