// Runs before the page is drawn, so that the other theme does not flash.
let theme = null;
try {
  theme = localStorage.getItem("quire.theme");
} catch {
  // The browser blocks storage.
}
document.documentElement.dataset.theme = theme ?? "auto";
