// The conversation on screen: views of the shown branch, scrolling along with a growing answer.
import { $, element } from "./dom.js";
import { viewOf } from "./message.js";
import { hideAlternatives } from "./tokens.js";

const scroller = $("scroller");

export class Thread {
  #conversation = null;
  #views = new Map(); // message id → view
  #pending = new Set(); // views to draw with the next frame
  #frame = 0;
  #following = true;
  #lastTop = 0;

  constructor(actions) {
    this.actions = actions;
    scroller.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    scroller.addEventListener("scroll", hideAlternatives, { passive: true });
    new ResizeObserver(() => this.#followDown()).observe(scroller);
    $("to-latest").addEventListener("click", () => this.followAgain());
  }

  /** Show `conversation`. Views of messages that remain are kept. */
  show(conversation) {
    if (conversation !== this.#conversation) {
      this.#conversation = conversation;
      this.#views.clear();
      $("log").replaceChildren();
    }
    hideAlternatives();
    const rows = conversation.path().map((message) => this.#row(message));
    rows.forEach((row, index) => {
      if ($("log").children[index] !== row) $("log").insertBefore(row, $("log").children[index] ?? null);
    });
    while ($("log").children.length > rows.length) $("log").lastElementChild.remove();
    $("welcome").hidden = rows.length > 0;
    this.#showSystem(conversation.settings.system);
    this.#followDown();
  }

  // Answers of one group are shown side by side in one row.
  #row(message) {
    const group = this.#conversation.group(message);
    const roots = group.map((each) => this.#view(each).root);
    if (group.length === 1) return roots[0];
    const row = $(`g-${message.group}`) ?? element("div", { class: "group", id: `g-${message.group}` });
    if (roots.some((root) => root.parentElement !== row)) row.replaceChildren(...roots);
    return row;
  }

  #view(message) {
    let view = this.#views.get(message.id);
    if (view?.message !== message) {
      view = viewOf(message, this.#conversation, this.actions);
      this.#views.set(message.id, view);
    }
    view.update();
    return view;
  }

  #showSystem(system) {
    $("system-strip").hidden = !system?.trim();
    $("system-text").textContent = system ?? "";
  }

  /** Redraw the message in the next frame. After a slow frame, pause for three times its duration. */
  changed(message) {
    const view = this.#views.get(message.id);
    if (view?.message !== message) return;
    this.#pending.add(view);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    const start = performance.now();
    for (const view of this.#pending) view.update();
    this.#pending.clear();
    this.#followDown();
    const taken = performance.now() - start;
    if (taken < 4) this.#frame = 0;
    else setTimeout(() => (this.#frame = this.#pending.size ? requestAnimationFrame(() => this.#draw()) : 0), 3 * taken);
  }

  /** Redraw the finished message immediately. */
  finished(message) {
    const view = this.#views.get(message.id);
    if (view?.message !== message) return;
    this.#pending.delete(view);
    view.update();
    this.#followDown();
  }

  editLastQuestion() {
    const last = this.#conversation.path().findLast(({ role }) => role === "user");
    if (last) this.#views.get(last.id).part("edit-button").click();
  }

  scrollTo(id) {
    const row = $(`m-${id}`);
    row?.scrollIntoView({ block: "center" });
    row?.classList.add("found");
    this.#noticeScroll();
  }

  followAgain() {
    this.#following = true;
    this.#followDown();
  }

  #followDown() {
    if (this.#following) scroller.scrollTop = scroller.scrollHeight;
    this.#noticeScroll();
  }

  // Stop following when the user scrolls up, until they return to the end.
  #noticeScroll() {
    const below = scroller.scrollHeight - scroller.clientHeight - scroller.scrollTop;
    if (below < 32) this.#following = true;
    else if (scroller.scrollTop < this.#lastTop - 1) this.#following = false;
    this.#lastTop = scroller.scrollTop;
    $("to-latest").hidden = this.#following || below < 32;
  }
}
