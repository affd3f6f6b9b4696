// The message field: draft, attached files, sending.
import { $, element, iconButton, load, save, toast } from "./dom.js";
import { isImage, readImage } from "./images.js";

const MOST_BYTES = 1_000_000; // of an attached file
const draftName = (id) => `quire.draft.${id}`;

const prompt = $("prompt");

export class Composer {
  #attachments = []; // { name, text }, or { name, image: a data URL }
  #draft = "new";
  #busy = false;

  /**
   * Callbacks: `send(text, attachments)`, `editLast()` to edit the last question, `takesImages()` and `writes()`: the
   * model does.
   */
  constructor({ send, editLast, takesImages, writes }) {
    Object.assign(this, { send, editLast, takesImages, writes });
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    prompt.addEventListener("input", () => this.#changed());
    prompt.addEventListener("keydown", (event) => this.#keyPressed(event));
    prompt.addEventListener("paste", ({ clipboardData }) => this.#attach([...clipboardData.files]));
    for (const [button, input] of [["attach", "file"], ["take-photo", "camera"]]) {
      $(button).addEventListener("click", () => $(input).click());
      $(input).addEventListener("change", () => {
        this.#attach([...$(input).files]);
        $(input).value = "";
      });
    }
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      this.#attach([...event.dataTransfer.files]);
    });
  }

  /** Show the draft of a conversation; with "new", the draft of the next conversation. */
  open(id) {
    this.#draft = id;
    ({ text: prompt.value, attachments: this.#attachments } = load(draftName(id), { text: "", attachments: [] }));
    this.#showAttachments();
    this.#fit();
  }

  forget(id) {
    save(draftName(id), undefined);
  }

  setBusy(busy) {
    const hadFocus = document.activeElement === $("stop");
    this.#busy = busy;
    $("stop").hidden = !busy;
    $("send").hidden = busy;
    if (hadFocus) prompt.focus();
    this.#allowSend();
  }

  focus() {
    prompt.focus();
  }

  #keyPressed(event) {
    if (event.key === "ArrowUp" && prompt.value === "" && !this.#busy) this.editLast();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#submit();
  }

  #submit() {
    const text = prompt.value.trim();
    if (this.#busy || (text === "" && !this.#attachments.length)) return;
    const attachments = this.#attachments;
    if (!this.writes()) return toast("This model computes embeddings and writes no answers: choose another model.");
    if (attachments.some(({ image }) => image) && !this.takesImages()) return toast("This model reads text only: remove the images, or choose another model.");
    prompt.value = "";
    this.#attachments = [];
    this.#showAttachments();
    this.#changed();
    this.send(text, attachments);
  }

  #changed() {
    const draft = prompt.value || this.#attachments.length ? { text: prompt.value, attachments: this.#attachments } : undefined;
    save(draftName(this.#draft), draft);
    this.#fit();
  }

  #fit() {
    prompt.rows = 1;
    const line = parseFloat(getComputedStyle(prompt).lineHeight);
    prompt.rows = Math.max(1, Math.min(10, Math.round((prompt.scrollHeight - 20) / line)));
    this.#allowSend();
  }

  #allowSend() {
    $("send").disabled = this.#busy || (prompt.value.trim() === "" && !this.#attachments.length);
  }

  async #attach(files) {
    for (const file of files) {
      if (isImage(file) && this.takesImages()) {
        const image = await readImage(file);
        if (image) this.#attachments = [...this.#attachments, { name: file.name || "image", image }];
        else toast(`${file.name || "This image"} cannot be read.`);
        continue;
      }
      const text = file.size <= MOST_BYTES ? await file.text() : null;
      if (text === null) toast(`${file.name} is larger than 1 MB.`);
      else if (text.includes("\0") || text.includes("\ufffd")) toast(`${file.name} is not a text file: this model reads text only.`);
      else this.#attachments = [...this.#attachments, { name: file.name, text }];
    }
    this.#showAttachments();
    this.#changed();
  }

  #showAttachments() {
    const remove = (gone) => {
      this.#attachments = this.#attachments.filter((each) => each !== gone);
      this.#showAttachments();
      this.#changed();
    };
    const chips = this.#attachments.map((each) =>
      element("li", { class: "chip" }, ...(each.image ? [element("img", { src: each.image, alt: "" })] : []), element("bdi", {}, each.name), iconButton("close", `Remove ${each.name}`, () => remove(each))),
    );
    $("chips").replaceChildren(...chips);
    $("chips").hidden = chips.length === 0;
  }
}
