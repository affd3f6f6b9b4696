// The server's HTTP API, for the page.
import { readEvents } from "./sse.js";

/** What went wrong, in words for the reader. status: the HTTP status, or 0 when no answer came at all. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The model cards of /v1/models. */
export async function listModels(key) {
  const response = await request("v1/models", { key });
  return (await response.json()).data;
}

/**
 * One streamed chat completion. Yields { text, reasoning, finish, usage }, each present when the server sent it.
 * Throws ApiError; an abort through `signal` throws the browser's AbortError.
 */
export async function* streamChat(body, { key, signal }) {
  const response = await request("v1/chat/completions", {
    key,
    signal,
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parse(data);
      if (chunk.error) throw new ApiError(errorText(chunk) ?? "The server reported an error.", chunk.error.code ?? 500);
      const choice = chunk.choices?.[0];
      yield {
        text: choice?.delta?.content ?? "",
        reasoning: choice?.delta?.reasoning ?? "",
        finish: choice?.finish_reason ?? null,
        usage: chunk.usage ?? null,
      };
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("The connection to the server was lost.", 0);
  }
  throw new ApiError("The connection closed before the answer was complete.", 0);
}

async function request(path, { key, ...options }) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { headers, ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", 0);
  }
  if (response.ok) return response;
  const told = errorText(await response.json().catch(() => null));
  throw new ApiError(told ?? `The server answered ${response.status} ${response.statusText}`.trim() + ".", response.status);
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
