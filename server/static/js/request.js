// Converts a conversation to the body of a chat completion request.
import { fenced } from "./markdown.js";
import { parseJSON } from "./schemas.js";
import { toolsOf } from "./tools.js";

const NO_RESULT = "No result was given.";

/** Return the request body for `answer`, a message of the conversation. `resume`: continue its text. */
export function requestFor(conversation, answer, resume) {
  const { settings } = conversation;
  const path = conversation.path(answer.parent);
  const body = { messages: messagesFor(resume ? [...path, answer] : path, settings), ...settings.parameters };
  if (answer.model) body.model = answer.model; // otherwise the server's only model
  if (resume) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const tools = toolsOf(settings);
  if (tools.length) body.tools = tools;
  if (settings.schema?.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parseJSON(settings.schema) } };
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/** Return the API's messages for a branch. */
export function messagesFor(path, settings) {
  const messages = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const message of path) {
    if (message.role === "user") {
      messages.push({ role: "user", content: withAttachments(message) });
    } else if (message.content !== "" || message.calls?.length) {
      messages.push(...answered(message));
    } else if (messages.at(-1)?.role === "user") {
      messages.pop(); // templates require alternating roles: leave out a question without an answer
    }
  }
  return messages;
}

function answered({ content, calls = [] }) {
  if (!calls.length) return [{ role: "assistant", content }];
  const made = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? NO_RESULT }));
  return [{ role: "assistant", content, tool_calls: made }, ...results];
}

function withAttachments({ content, attachments = [] }) {
  const files = attachments.filter(({ image }) => !image).map(({ name, text }) => `${name}:\n${fenced(text)}`);
  const text = [...files, content].filter(Boolean).join("\n\n");
  const images = attachments.filter(({ image }) => image).map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  if (!images.length) return text;
  return text ? [...images, { type: "text", text }] : images;
}
