// The list of conversations: search, rename, delete, export, import.
import { $, download, element, iconButton, load, save, toast } from "./dom.js";
import * as store from "./store.js";
import { fromJSON, toJSON, toMarkdown } from "./transfer.js";

const OPEN = "quire.sidebar";
const wide = matchMedia("(min-width: 60rem)");

export class Sidebar {
  #current = "";
  #menuFor = null; // the conversation of the open menu
  #shown = 0; // number of the latest search: older results are dropped

  /** Callbacks: `renamed(id, title)`, `deleted(id)`. */
  constructor({ renamed, deleted }) {
    this.renamed = renamed;
    this.deleted = deleted;
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
    for (const name of ["rename", "markdown", "json", "delete"]) $(`menu-${name}`).addEventListener("click", () => this.#choose(name));
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

  /** Close the list on a narrow page, where it covers the conversation. */
  close() {
    if (!wide.matches) this.#show(false);
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
    $("conversations").replaceChildren(...listed.map((meta) => this.#item(meta)));
    $("no-conversations").hidden = listed.length > 0;
    $("no-conversations").textContent = wanted ? "Nothing found." : "Conversations are stored in this browser.";
  }

  #item(meta) {
    const link = element("a", { href: `#/c/${meta.id}`, dir: "auto" }, meta.title || "Conversation");
    if (meta.id === this.#current) link.setAttribute("aria-current", "page");
    const more = iconButton("more", `Options for ${meta.title}`, () => this.#openMenu(meta, item, more), "more");
    const item = element("li", {}, link, more);
    return item;
  }

  #openMenu(meta, item, button) {
    this.#menuFor = { meta, item };
    const menu = $("conversation-menu");
    menu.showPopover();
    const box = button.getBoundingClientRect();
    menu.style.left = `${Math.min(box.left, innerWidth - menu.offsetWidth - 8)}px`;
    menu.style.top = `${Math.min(box.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
    $("menu-rename").focus();
  }

  async #choose(action) {
    $("conversation-menu").hidePopover();
    const { meta, item } = this.#menuFor;
    if (action === "rename") return this.#rename(meta, item);
    const conversation = await store.loadConversation(meta.id);
    if (!conversation) return this.refresh();
    if (action === "delete") return this.#delete(conversation);
    const name = fileName(meta.title);
    if (action === "json") return download(`${name}.json`, toJSON([conversation]), "application/json");
    return download(`${name}.md`, toMarkdown(conversation), "text/markdown");
  }

  #rename(meta, item) {
    const input = element("input", { type: "text", "aria-label": "Title", dir: "auto", class: "rename" });
    input.value = meta.title;
    item.replaceChildren(input);
    input.select();
    let done = false;
    const finish = async (keeps) => {
      if (done) return;
      done = true;
      const title = input.value.trim();
      if (keeps && title && title !== meta.title) await this.renamed(meta.id, title);
      this.refresh();
    };
    input.addEventListener("blur", () => finish(true));
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") finish(false);
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

  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    try {
      const conversations = fromJSON(await file.text());
      let saved = true;
      for (const conversation of conversations) saved = (await store.saveConversation(conversation)) && saved;
      if (saved) toast(`Imported ${conversations.length} conversation${conversations.length === 1 ? "" : "s"}.`);
    } catch (error) {
      toast(`${file.name} cannot be imported: ${error.message}.`);
    }
    this.refresh();
  }
}

const fileName = (title) => title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 60) || "conversation";
