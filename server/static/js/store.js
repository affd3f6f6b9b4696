// Conversations in IndexedDB. Tabs notify each other of changes.
import { openDB } from "../vendor/idb.js";
import { Conversation } from "./conversation.js";

const channel = new BroadcastChannel("quire");
const opened = openDB("quire", 1, {
  upgrade(db) {
    db.createObjectStore("conversations", { keyPath: "id" });
    db.createObjectStore("messages", { keyPath: ["conversation", "id"] });
  },
});

const messagesOf = (id) => IDBKeyRange.bound([id], [id, []]);

/** Call `changed(id)` when another tab has written or deleted a conversation. */
export function onChangeElsewhere(changed) {
  channel.onmessage = ({ data }) => changed(data);
}

/** Return the conversations without their messages, most recently used first. */
export async function listConversations() {
  const db = await opened;
  return (await db.getAll("conversations")).sort((a, b) => b.updated - a.updated);
}

/** Return the conversation, or null. */
export async function loadConversation(id) {
  const db = await opened;
  const meta = await db.get("conversations", id);
  return meta ? new Conversation(meta, await db.getAll("messages", messagesOf(id))) : null;
}

/** Save the conversation's own fields and `messages`, by default all of them. */
export async function saveConversation(conversation, messages = [...conversation.messages.values()]) {
  const transaction = (await opened).transaction(["conversations", "messages"], "readwrite");
  transaction.objectStore("conversations").put(conversation.meta);
  for (const message of messages) transaction.objectStore("messages").put(message);
  await transaction.done;
  channel.postMessage(conversation.id);
}

export async function deleteConversation(id) {
  const transaction = (await opened).transaction(["conversations", "messages"], "readwrite");
  transaction.objectStore("conversations").delete(id);
  transaction.objectStore("messages").delete(messagesOf(id));
  await transaction.done;
  channel.postMessage(id);
}

/** Return ids of the conversations with `text` in the title or a message, ignoring case. */
export async function searchConversations(text) {
  const wanted = text.toLowerCase();
  const holds = (found) => (found ?? "").toLowerCase().includes(wanted);
  const db = await opened;
  const ids = new Set();
  for (const { id, title } of await db.getAll("conversations")) if (holds(title)) ids.add(id);
  for (let cursor = await db.transaction("messages").store.openCursor(); cursor; cursor = await cursor.continue()) {
    if (holds(cursor.value.content)) ids.add(cursor.value.conversation);
  }
  return ids;
}
