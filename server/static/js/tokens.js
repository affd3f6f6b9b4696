// The tokens of an answer with their probabilities and most likely alternatives.
import { $, element, place } from "./dom.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -0.01 ? 0 : 1)} %`;
const visible = (text) => text.replace(/\n/g, "⏎\n").replace(/^ | $/g, "·");

/** Return an element that shows `tokens`: [text, logprob, alternatives]. A pointer, a tap or the arrow keys select a token. */
export function tokensView(tokens) {
  const spans = tokens.map(([text, logprob], index) => {
    const certainty = Math.min(4, Math.floor(Math.exp(logprob) * 5)); // 0: unlikely … 4: nearly certain
    return element("span", { class: `token certainty-${certainty}`, "data-index": String(index) }, text);
  });
  const view = element("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Token probabilities" }, ...spans);
  let chosen = -1;
  const choose = (index) => {
    spans[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(spans.length - 1, index));
    spans[chosen].classList.add("chosen");
    showAlternatives(spans[chosen], tokens[chosen]);
  };
  const point = ({ target }) => target.dataset.index && choose(Number(target.dataset.index));
  const isMouse = ({ pointerType }) => pointerType !== "touch"; // a finger "leaves" when it is lifted
  view.addEventListener("pointerover", (event) => isMouse(event) && point(event));
  view.addEventListener("pointerleave", (event) => isMouse(event) && hideAlternatives());
  view.addEventListener("click", point);
  view.addEventListener("blur", hideAlternatives);
  view.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen + step);
  });
  return view;
}

function showAlternatives(span, [text, logprob, alternatives]) {
  const row = (name, value, chosen) =>
    element("tr", chosen ? { class: "chosen" } : {}, element("td", {}, visible(name)), element("td", {}, percent(value)));
  const rows = alternatives.map(([name, value]) => row(name, value, name === text));
  if (!alternatives.some(([name]) => name === text)) rows.unshift(row(text, logprob, true));
  const panel = $("alternatives");
  panel.querySelector("tbody").replaceChildren(...rows);
  panel.hidden = false;
  place(panel, span);
}

document.addEventListener("pointerdown", ({ target }) => target.closest(".tokens") || hideAlternatives());

export function hideAlternatives() {
  $("alternatives").hidden = true;
}
