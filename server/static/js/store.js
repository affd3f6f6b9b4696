// Conversations in IndexedDB. Tabs notify each other of changes. What the browser does not save stays in this tab's memory.
import { openDB } from "../vendor/idb.js";
import { Conversation } from "./conversation.js";

const channel = new BroadcastChannel("quire");
const opened = open(); // rejected if the browser blocks storage
opened.catch(() => null);
const unsaved = new Map(); // conversation id → Conversation

async function open() {
  return openDB("quire", 1, {
    upgrade(db) {
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("messages", { keyPath: ["conversation", "id"] });
    },
  });
}

const messagesOf = (id) => IDBKeyRange.bound([id], [id, []]);

/** Call `changed(id)` when another tab has written or deleted a conversation. */
export function onChangeElsewhere(changed) {
  channel.onmessage = ({ data }) => changed(data);
}

let warn = () => null;

/** Call `refused(conversation, error)` when the browser does not save a conversation; again only after it has been saved. */
export function onRefused(refused) {
  warn = refused;
}

// What `read(db)` returns, or `fallback` if the browser blocks storage.
async function reading(read, fallback) {
  try {
    return await read(await opened);
  } catch {
    return fallback;
  }
}

/** Return the conversations without their messages, most recently used first. */
export async function listConversations() {
  const saved = await reading((db) => db.getAll("conversations"), []);
  const listed = saved.filter(({ id }) => !unsaved.has(id)).concat(Array.from(unsaved.values(), ({ meta }) => meta));
  return listed.sort((a, b) => b.updated - a.updated);
}

/** Return the conversation, or null. */
export async function loadConversation(id) {
  if (unsaved.has(id)) return unsaved.get(id);
  return reading(async (db) => {
    const meta = await db.get("conversations", id);
    return meta ? new Conversation(meta, await db.getAll("messages", messagesOf(id))) : null;
  }, null);
}

/** Save the conversation's own fields and `messages`, by default all of them. Returns whether it is saved: see `onRefused`. */
export async function saveConversation(conversation, messages = [...conversation.messages.values()]) {
  const { id, meta } = conversation;
  const all = unsaved.has(id) ? [...conversation.messages.values()] : messages;
  try {
    const transaction = (await opened).transaction(["conversations", "messages"], "readwrite");
    const store = transaction.objectStore("messages");
    const puts = [transaction.objectStore("conversations").put(meta), ...all.map((message) => store.put(message))];
    await Promise.all([...puts, transaction.done]);
    unsaved.delete(id);
    channel.postMessage(id);
    return true;
  } catch (error) {
    if (!unsaved.has(id)) warn(conversation, error);
    unsaved.set(id, conversation);
    return false;
  }
}

/** Return whether conversations are lost with this page. */
export function hasUnsaved() {
  return unsaved.size > 0;
}

export async function deleteConversation(id) {
  unsaved.delete(id);
  await reading((db) => {
    const transaction = db.transaction(["conversations", "messages"], "readwrite");
    const deleted = ["conversations", "messages"].map((name) =>
      transaction.objectStore(name).delete(name === "messages" ? messagesOf(id) : id),
    );
    return Promise.all([...deleted, transaction.done]);
  });
  channel.postMessage(id);
}

/** Return ids of the conversations with `text` in the title or a message, ignoring case. */
export async function searchConversations(text) {
  const wanted = text.toLowerCase();
  const holds = (found) => (found ?? "").toLowerCase().includes(wanted);
  const ids = new Set();
  for (const { id, meta, messages } of unsaved.values()) {
    if (holds(meta.title) || [...messages.values()].some(({ content }) => holds(content))) ids.add(id);
  }
  await reading(async (db) => {
    for (const { id, title } of await db.getAll("conversations")) if (holds(title)) ids.add(id);
    for (let cursor = await db.transaction("messages").store.openCursor(); cursor; cursor = await cursor.continue()) {
      if (holds(cursor.value.content)) ids.add(cursor.value.conversation);
    }
  });
  return ids;
}
