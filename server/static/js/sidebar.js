// The list of conversations: search, rename, delete, export, import.
import { $, download, element, icon, iconButton, load, place, save, toast } from "./dom.js";
import * as store from "./store.js";
import { copyOf, fromJSON, toJSON, toMarkdown } from "./transfer.js";

const OPEN = "quire.sidebar";
const CLOSED = "quire.folders"; // names of the closed ones
const DAY = 86_400_000; // milliseconds
const AROUND = 20; // characters shown before a match
const wide = matchMedia("(min-width: 60rem)");

export class Sidebar {
  #current = "";
  #menuFor = null; // the conversation of the open menu
  #shown = 0; // number of the latest search: older results are dropped

  /** Callbacks: `renamed(id, { title, named } or { folder })`, `deleted(id)`, `changed(id)` after an import. */
  constructor({ renamed, deleted, changed }) {
    Object.assign(this, { renamed, deleted, changed });
    const adapt = () => this.#show(wide.matches && load(OPEN, true));
    adapt();
    wide.addEventListener("change", adapt);
    $("toggle-sidebar").addEventListener("click", () => this.toggle());
    $("shade").addEventListener("click", () => this.#show(false));
    $("search").addEventListener("input", () => this.refresh());
    $("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") $("conversations").querySelector("a")?.click();
    });
    $("conversations").addEventListener("click", ({ target }) => target.closest("a") && !wide.matches && this.#show(false));
    for (const name of ["rename", "folder", "markdown", "json", "delete"]) $(`menu-${name}`).addEventListener("click", () => this.#choose(name));
    $("export-all").addEventListener("click", () => this.#exportAll());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import());
  }

  toggle() {
    this.#show(document.body.dataset.sidebar !== "open");
    if (wide.matches) save(OPEN, document.body.dataset.sidebar === "open");
  }

  search() {
    this.#show(true);
    $("search").focus();
    $("search").select();
  }

  /** Close the list on a narrow page, where it covers the conversation. Returns whether it was open there. */
  close() {
    if (wide.matches || document.body.dataset.sidebar !== "open") return false;
    this.#show(false);
    return true;
  }

  /** As `close`, by the keyboard: the focus goes back to the button that opens the list. */
  dismiss() {
    const closed = this.close();
    if (closed) $("toggle-sidebar").focus();
    return closed;
  }

  #show(open) {
    document.body.dataset.sidebar = open ? "open" : "closed";
    $("sidebar").inert = !open;
    $("toggle-sidebar").setAttribute("aria-expanded", String(open));
  }

  async refresh(current = this.#current) {
    this.#current = current;
    const round = ++this.#shown;
    const wanted = $("search").value.trim();
    const [all, found] = await Promise.all([store.listConversations(), wanted ? store.searchConversations(wanted) : null]);
    if (round !== this.#shown) return;
    const listed = all.filter(({ id }) => !found || found.has(id));
    const list = (metas) => element("ul", {}, ...metas.map((meta) => this.#item(meta, wanted, found?.get(meta.id))));
    const folders = Map.groupBy(listed.filter(({ folder }) => folder), ({ folder }) => folder);
    const names = [...folders.keys()].sort((a, b) => a.localeCompare(b));
    const dates = Map.groupBy(listed.filter(({ folder }) => !folder), ({ updated }) => dateHeading(updated));
    $("conversations").replaceChildren(
      ...names.map((name) => folderOf(name, list(folders.get(name)), wanted !== "")),
      ...Array.from(dates, ([heading, metas]) => element("section", {}, element("h2", {}, heading), list(metas))),
    );
    $("folders").replaceChildren(...names.map((name) => new Option(name)));
    $("no-conversations").hidden = listed.length > 0;
    $("no-conversations").textContent = wanted ? "Nothing found." : "Conversations are stored in this browser.";
  }

  /** `wanted`: the text that was searched for. `message`: one that holds it. */
  #item(meta, wanted, message) {
    const title = element("span", { class: "title" }, ...marked(meta.title || "Conversation", wanted));
    const link = element("a", { href: `#/c/${meta.id}${message ? `/${message.id}` : ""}`, dir: "auto" }, title);
    if (message) link.append(element("span", { class: "match", dir: "auto" }, ...marked(message.content, wanted, AROUND)));
    if (meta.id === this.#current) link.setAttribute("aria-current", "page");
    const more = iconButton("more", `Options for ${meta.title}`, () => this.#openMenu(meta, item, more), "more");
    const item = element("li", {}, link, more);
    return item;
  }

  #openMenu(meta, item, button) {
    this.#menuFor = { meta, item };
    const menu = $("conversation-menu");
    menu.showPopover();
    place(menu, button);
    $("menu-rename").focus();
  }

  async #choose(action) {
    $("conversation-menu").hidePopover();
    const { meta, item } = this.#menuFor;
    if (action === "rename") {
      return this.#ask(item, { label: "Title", value: meta.title }, (title) => title && this.renamed(meta.id, { title, named: true }));
    }
    if (action === "folder") {
      const field = { label: "Folder", value: meta.folder ?? "", list: "folders", placeholder: "Folder; empty: none" };
      return this.#ask(item, field, (folder) => this.renamed(meta.id, { folder }));
    }
    const conversation = await store.loadConversation(meta.id);
    if (!conversation) return this.refresh();
    if (action === "delete") return this.#delete(conversation);
    const name = fileName(meta.title);
    if (action === "json") return download(`${name}.json`, toJSON([conversation]), "application/json");
    return download(`${name}.md`, toMarkdown(conversation), "text/markdown");
  }

  /** Ask for a text in place of the conversation's item. `take(text)` is called if it was changed. */
  #ask(item, { label, value, list = "", placeholder = "" }, take) {
    const input = element("input", { type: "text", "aria-label": label, dir: "auto", class: "rename", placeholder });
    if (list) input.setAttribute("list", list);
    input.value = value;
    item.replaceChildren(input);
    input.select();
    let done = false;
    const finish = async (keeps) => {
      if (done) return;
      done = true;
      const text = input.value.trim();
      if (keeps && text !== value) await take(text);
      this.refresh();
    };
    input.addEventListener("blur", () => finish(true));
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key !== "Escape") return;
      event.preventDefault(); // it closes this field alone
      finish(false);
      event.stopPropagation();
    });
  }

  async #delete(conversation) {
    await this.deleted(conversation.id);
    await this.refresh();
    toast("Deleted the conversation.", "Undo", async () => {
      await store.saveConversation(conversation);
      location.hash = `#/c/${conversation.id}`;
      this.refresh();
    });
  }

  async #exportAll() {
    const metas = await store.listConversations();
    const all = await Promise.all(metas.map(({ id }) => store.loadConversation(id)));
    download("quire-conversations.json", toJSON(all.filter(Boolean)), "application/json");
  }

  /** Save an imported conversation, unless it is here. Returns what became of it. */
  async #take(given) {
    const here = await store.loadConversation(given.id);
    const hasAll = (one, other) => [...other.messages.keys()].every((id) => one.messages.has(id));
    if (here && hasAll(here, given)) return "known";
    const replaces = here && hasAll(given, here); // it was continued elsewhere
    const saved = await store.saveConversation(here && !replaces ? copyOf(given) : given);
    if (replaces) await this.changed(given.id);
    return !saved ? "refused" : replaces ? "updated" : "imported";
  }

  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    try {
      const counts = { imported: 0, updated: 0, known: 0, refused: 0 };
      for (const conversation of fromJSON(await file.text())) counts[await this.#take(conversation)] += 1;
      if (!counts.refused) toast(importText(counts));
    } catch (error) {
      toast(`${file.name} cannot be imported: ${error.message}.`);
    }
    this.refresh();
  }
}

/** Return the heading under which a conversation is listed. `updated`, `now`: in milliseconds. */
export function dateHeading(updated, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY) return "Yesterday";
  if (updated >= midnight - 7 * DAY) return "Previous 7 days";
  if (updated >= midnight - 30 * DAY) return "Previous 30 days";
  return new Date(updated).toLocaleDateString("en", { month: "long", year: "numeric" });
}

// A folder can be closed, and stays so but for a search.
function folderOf(name, list, searching) {
  const others = () => load(CLOSED, []).filter((each) => each !== name);
  const box = element("details", { class: "folder" }, element("summary", {}, icon("folder"), name), list);
  box.open = searching || !load(CLOSED, []).includes(name);
  box.addEventListener("toggle", () => searching || save(CLOSED, box.open ? others() : [...others(), name]));
  return box;
}

// Mark the first `wanted` in a text, ignoring case. `around`: begin so many characters before it.
function marked(text, wanted, around = Infinity) {
  const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (at < 0) return [text];
  const start = at <= around ? 0 : text.lastIndexOf(" ", at - around) + 1 || at;
  const end = at + wanted.length;
  return [(start ? "…" : "") + text.slice(start, at), element("mark", {}, text.slice(at, end)), text.slice(end, end + 100)];
}

function importText({ imported, updated, known }) {
  const count = (number) => `${number} conversation${number === 1 ? "" : "s"}`;
  const parts = [];
  if (imported || !(updated || known)) parts.push(`Imported ${count(imported)}.`);
  if (updated) parts.push(`Updated ${count(updated)}.`);
  if (known) parts.push(`${count(known)} ${known === 1 ? "was" : "were"} here already.`);
  return parts.join(" ");
}

const fileName = (title) => title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation";
