// Keyboard shortcuts of the page. The dialog that lists them is in index.html.
import { $ } from "./dom.js";

export function listenForShortcuts(actions) {
  const commands = {
    "ctrl+k": actions.search,
    "ctrl+b": actions.toggleSidebar,
    "ctrl+,": actions.openSettings,
    "ctrl+.": actions.openStatus,
    "ctrl+shift+o": actions.newChat,
    "ctrl+shift+c": actions.copyLast,
    "ctrl+/": () => $("shortcuts").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
    if (event.key === "Escape") return actions.escape();
    const typing = event.target.matches("input, textarea, select");
    if (!typing && event.key === "?") return $("shortcuts").showModal();
    if (!typing && event.key === "/") {
      event.preventDefault();
      return actions.focusPrompt();
    }
    if (!event.ctrlKey && !event.metaKey) return;
    const command = commands[`ctrl+${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`];
    if (!command) return;
    event.preventDefault();
    command();
  });
  $("shortcuts").addEventListener("click", (event) => event.target === $("shortcuts") && $("shortcuts").close());
  $("open-shortcuts").addEventListener("click", () => $("shortcuts").showModal());
}
