// Conversations in IndexedDB. Tabs notify each other of changes. What the browser does not save stays in this tab's memory.
import { openDB } from "../vendor/idb.js";
import { Conversation } from "./conversation.js";

const channel = new BroadcastChannel("quire");
const opened = openDatabase(); // rejected if the browser blocks storage
opened.catch(() => null); // each use handles that
const unsaved = new Map(); // conversation id → Conversation
let refused = () => null;

async function openDatabase() {
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

/** Call `callback(conversation, error)` when the browser does not save a conversation, once until it does. */
export function onRefused(callback) {
  refused = callback;
}

// Return what `read(db)` returns, or `fallback` if nothing can be read.
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
  const retries = unsaved.has(id);
  const written = retries ? [...conversation.messages.values()] : messages;
  try {
    const transaction = (await opened).transaction(["conversations", "messages"], "readwrite");
    const store = transaction.objectStore("messages");
    const puts = [transaction.objectStore("conversations").put(meta), ...written.map((message) => store.put(message))];
    await Promise.all([...puts, transaction.done]);
    if (retries) unsaved.delete(id); // otherwise a save that failed meanwhile may have had other messages
    channel.postMessage(id);
    return true;
  } catch (error) {
    if (!unsaved.has(id)) refused(conversation, error);
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
  const db = await opened.catch(() => null);
  if (!db) return;
  const transaction = db.transaction(["conversations", "messages"], "readwrite");
  transaction.objectStore("conversations").delete(id);
  transaction.objectStore("messages").delete(messagesOf(id));
  await transaction.done;
  channel.postMessage(id);
}

/**
 * Return the conversations with `text` in the title or a message, ignoring case: id → its oldest message with the text,
 * or null.
 */
export async function searchConversations(text) {
  const wanted = text.toLowerCase();
  const holds = (found) => (found ?? "").toLowerCase().includes(wanted);
  const found = new Map();
  const look = (message) => {
    const best = found.get(message.conversation);
    if (holds(message.content) && !(best?.index < message.index)) found.set(message.conversation, message);
  };
  for (const { id, meta, messages } of unsaved.values()) {
    if (holds(meta.title)) found.set(id, null);
    messages.forEach(look);
  }
  await reading(async (db) => {
    for (const { id, title } of await db.getAll("conversations")) if (holds(title)) found.set(id, null);
    for (let cursor = await db.transaction("messages").store.openCursor(); cursor; cursor = await cursor.continue()) look(cursor.value);
  });
  return found;
}
