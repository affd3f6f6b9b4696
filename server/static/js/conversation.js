// A conversation: a tree of messages, one branch of which is shown. Plain data, without DOM or storage.
//
// A message: { conversation, id, index, parent, role: "user" | "assistant", content, created }, and
//   for a user: attachments: [{ name, text } or { name, image: a data URL }];
//   for an assistant: model, server: its address or "" for this page's own, state: "waiting" | "streaming" | "done" | "stopped" | "failed", error, reasoning, thoughtSeconds,
//   calls: [{ id, name, arguments, result }], tokens: [[text, logprob, [[text, logprob], …]], …], finish, stats, and
//   group: the same for answers of several models shown side by side.

export const ROOT = ""; // the parent of the first messages

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12)); // randomUUID exists only on https and localhost
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function isBusy(message) {
  return message.state === "waiting" || message.state === "streaming";
}

export class Conversation {
  /** `meta`: { id, title, named: by the user, folder: its name or "", created, updated, settings, selected: parent → child }. */
  constructor(meta, messages = []) {
    this.meta = meta;
    this.messages = new Map(messages.map((message) => [message.id, message]));
  }

  static create(settings) {
    const now = Date.now();
    const meta = { id: newId(), title: "", named: false, created: now, updated: now, selected: {} };
    return new Conversation({ ...meta, settings: structuredClone(settings) });
  }

  get id() {
    return this.meta.id;
  }

  get settings() {
    return this.meta.settings;
  }

  /** Return the alternative messages after `parent`, oldest first. */
  children(parent) {
    return [...this.messages.values()].filter((message) => message.parent === parent).sort((a, b) => a.index - b.index);
  }

  /** Return the shown branch, or with `end` the branch up to and including that message. */
  path(end = null) {
    if (end !== null) {
      const path = [];
      for (let at = this.messages.get(end); at; at = this.messages.get(at.parent)) path.unshift(at);
      return path;
    }
    const children = Map.groupBy(this.messages.values(), (message) => message.parent);
    const path = [];
    for (let parent = ROOT; children.has(parent); parent = path.at(-1).id) {
      const alternatives = children.get(parent);
      const newest = alternatives.reduce((a, b) => (b.index > a.index ? b : a));
      path.push(alternatives.find(({ id }) => id === this.meta.selected[parent]) ?? newest);
    }
    return path;
  }

  /** Return the answers shown side by side with `message`, including it. */
  group(message) {
    if (!message.group) return [message];
    return this.children(message.parent).filter(({ group }) => group === message.group);
  }

  /** Return `message` and its alternatives. Another group of side-by-side answers counts as one. */
  alternatives(message) {
    const others = new Set([message.group || message.id]);
    return this.children(message.parent).filter((each) => {
      const key = each.group || each.id;
      return each === message || (!others.has(key) && others.add(key));
    });
  }

  /** Add a message and show it after its parent. */
  add(fields) {
    const index = 1 + Math.max(-1, ...Array.from(this.messages.values(), (message) => message.index));
    const message = { conversation: this.id, id: newId(), index, created: Date.now(), ...fields };
    this.messages.set(message.id, message);
    this.select(message);
    if (!this.meta.named && !this.meta.title && message.role === "user") this.meta.title = titleOf(message);
    return message;
  }

  select(message) {
    this.meta.selected[message.parent] = message.id;
    this.meta.updated = Date.now();
  }

  /** Show the branch of the message with this id. */
  reveal(id) {
    for (const message of this.path(id)) this.meta.selected[message.parent] = message.id;
  }

  get busy() {
    return [...this.messages.values()].some(isBusy);
  }
}

function titleOf({ content, attachments }) {
  const line = content.trim().split("\n")[0] || attachments?.[0]?.name || "Conversation";
  return line.length > 80 ? `${line.slice(0, 79)}…` : line;
}
