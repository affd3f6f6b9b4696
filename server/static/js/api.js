// Client for the server's HTTP API. URLs are relative: the server may be mounted below a path.
import { readEvents } from "./sse.js";
import { load, save } from "./dom.js";

const KEY = "quire.key";
const POLICY = document.querySelector("meta[http-equiv]").content;
const PATIENCE = 5_000; // milliseconds for the response to a probe

/** An error with a message for the user. status: the HTTP status, or 0 if there was no response. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Addresses of other servers (--page-servers), each with a slash at its end. "" is the page's own server. */
export const SERVERS = POLICY.match(/connect-src 'self'([^;]*)/)[1].split(" ").filter(Boolean);

// API keys are stored until the tab is closed, one for each server.
export const apiKey = {
  get: (server = "") => load(KEY + server, "", "sessionStorage"),
  set: (value, server = "") => save(KEY + server, value || undefined, "sessionStorage"),
};

/** Return the model cards of /v1/models. */
export async function listModels(server = "") {
  return (await (await request("v1/models", {}, server)).json()).data;
}

/** Return { key, id, server, images: it reads them, writes: it answers } of a model card. */
export function modelFrom({ id, input_modalities: reads, output_modalities: writes }, server = "") {
  const key = server ? `${server} ${id}` : id;
  return { key, id, server, images: Boolean(reads?.includes("image")), writes: writes?.includes("text") ?? true };
}

/** Return the schema of a chat completion's parameters, with types, ranges and descriptions. */
export async function chatParameters() {
  const { components } = await (await request("openapi.json")).json();
  return components.schemas.ChatCompletionRequest.properties;
}

/** Return the metrics in Prometheus' text format. */
export async function readMetrics() {
  return (await request("metrics")).text();
}

/** Return { ok, state }: is the server ready, and the engine's state, from /readyz. Throws without a response. */
export async function readiness() {
  const probe = (path) => fetch(path, { headers: authorization(), cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  const ready = await probe("readyz");
  if (ready.status === 200 || ready.status === 503) return { ok: ready.ok, state: await ready.json().catch(() => ({})) };
  return { ok: (await probe("health")).ok, state: {} };
}

/** Return the number of tokens of a conversation's prompt. */
export async function countTokens(body) {
  const response = await request("tokenize", { method: "POST", body: JSON.stringify(body) });
  return (await response.json()).count;
}

/**
 * Stream a chat completion. Yields { text, reasoning, calls, logprobs, finish, usage, metrics }, each empty or null if
 * the server did not send it. Throws ApiError; an abort through `signal` throws the browser's AbortError.
 */
export async function* streamChat(body, signal, server = "") {
  const streaming = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(streaming), signal }, server);
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parse(data);
      if (chunk.error) throw new ApiError(errorText(chunk) ?? "The server reported an error.", chunk.error.code ?? 500);
      const choice = chunk.choices?.[0];
      yield {
        text: choice?.delta?.content ?? "",
        reasoning: choice?.delta?.reasoning ?? "",
        calls: choice?.delta?.tool_calls ?? [],
        logprobs: choice?.logprobs?.content ?? [],
        finish: choice?.finish_reason ?? null,
        usage: chunk.usage ?? null,
        metrics: chunk.metrics ?? null,
      };
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("The connection to the server was lost.", 0);
  }
  throw new ApiError("The connection closed before the answer was complete.", 0);
}

function authorization(server) {
  const key = apiKey.get(server);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options = {}, server = "") {
  const headers = { ...authorization(server), ...(options.body ? { "Content-Type": "application/json" } : {}) };
  let response;
  try {
    response = await fetch(server + path, { headers, ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(server ? unreachable(server) : "The server cannot be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) {
    throw new ApiError(apiKey.get(server) ? "The server rejected this API key." : "The server requires an API key.", 401);
  }
  const told = errorText(await response.json().catch(() => null));
  throw new ApiError(told ?? `The server answered ${response.status} ${response.statusText}`.trim() + ".", response.status);
}

// Browsers do not tell a page which it is.
function unreachable(server) {
  if (!SERVERS.includes(server)) return `This page may not use ${server}: see --page-servers.`;
  return `${server} cannot be reached, or does not allow this page: start it with --allowed-origins ${location.origin}`;
}

function errorText(body) {
  const error = body?.error;
  return typeof error === "string" ? error : (error?.message ?? null);
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiError("The server sent an event that is not JSON.", 0);
  }
}
