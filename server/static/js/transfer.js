// Conversations as files: JSON for export and import, Markdown for reading.
import { Conversation, isBusy, newId } from "./conversation.js";

const FORMAT = "quire-conversations";

export function toJSON(conversations) {
  const written = conversations.map(({ meta, messages }) => ({ ...meta, messages: [...messages.values()] }));
  return JSON.stringify({ format: FORMAT, version: 1, conversations: written }, null, 1);
}

/** Return the shown branch as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.meta.title}`];
  if (conversation.settings.system?.trim()) parts.push(`> **System:** ${conversation.settings.system.replace(/\n/g, "\n> ")}`);
  for (const { role, content, model, attachments = [], calls = [] } of conversation.path()) {
    parts.push(role === "user" ? "## You" : `## ${model || "Answer"}`);
    for (const { name, image } of attachments) if (image) parts.push(`![${name.replace(/[[\]]/g, "")}](${image})`);
    for (const { name, text } of attachments.filter(({ image }) => !image)) parts.push(`${name}:\n\n\`\`\`\`\n${text}\n\`\`\`\``);
    if (content) parts.push(content);
    for (const call of calls) parts.push(`Calls \`${call.name}(${call.arguments})\`: ${call.result ?? "no result"}`);
  }
  return `${parts.join("\n\n")}\n`;
}

/** Read an exported file. Conversations and messages keep their ids. Throws for any other file. */
export function fromJSON(text) {
  const given = JSON.parse(text);
  if (given?.format !== FORMAT || !Array.isArray(given.conversations)) throw new Error("not a file of exported conversations");
  return given.conversations.map(readConversation);
}

/** Return the conversation under a new id. */
export function copyOf({ meta, messages }) {
  const id = newId();
  return new Conversation({ ...meta, id }, Array.from(messages.values(), (message) => ({ ...message, conversation: id })));
}

const idOf = (id) => (/^[0-9a-f]{24}$/.test(id) ? id : newId());
const string = (value) => (typeof value === "string" ? value : "");
const object = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});
const isImageURL = (value) => /^data:image\/[a-z]+;base64,[\w+/=]*$/.test(string(value));
const list = (value) => (Array.isArray(value) ? value : []);

// Only known fields are read, each converted to its type.
function readConversation({ id, title, named, folder, created, updated, settings, selected, messages }) {
  const conversation = Conversation.create(object(settings));
  const kept = { id: idOf(id), title: string(title), named: Boolean(named), folder: string(folder), created: Number(created) || Date.now(), updated: Number(updated) || Date.now() };
  Object.assign(conversation.meta, kept);
  const ids = new Map(list(messages).map(({ id }) => [id, idOf(id)]));
  ids.set("", "");
  for (const message of list(messages)) {
    if (!ids.has(message.parent)) continue;
    const read = { ...readMessage(message), id: ids.get(message.id), parent: ids.get(message.parent), conversation: conversation.id };
    conversation.messages.set(read.id, read);
  }
  conversation.meta.selected = Object.fromEntries(
    Object.entries(object(selected)).map(([parent, child]) => [ids.get(parent) ?? "", ids.get(child)]),
  );
  return conversation;
}

function readMessage(message) {
  const base = { index: Number(message.index) || 0, created: Number(message.created) || 0, content: string(message.content) };
  const file = ({ name, text, image }) => ({ name: string(name), ...(isImageURL(image) ? { image } : { text: string(text) }) });
  if (message.role === "user") return { ...base, role: "user", attachments: list(message.attachments).map(file) };
  const call = (each) => ({
    id: string(each.id),
    name: string(each.name),
    arguments: string(each.arguments),
    result: each.result === null ? null : string(each.result),
  });
  return {
    ...base,
    role: "assistant",
    model: string(message.model),
    server: string(message.server),
    group: string(message.group),
    state: isBusy(message) ? "stopped" : string(message.state) || "done",
    error: message.error ? string(message.error) : null,
    reasoning: string(message.reasoning),
    thoughtSeconds: Number(message.thoughtSeconds) || null,
    finish: message.finish ? string(message.finish) : null,
    calls: list(message.calls).map(call),
    stats: null,
  };
}
