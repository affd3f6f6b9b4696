// Loaded before the page is drawn, so that a chosen theme does not flash in the other one.
document.documentElement.dataset.theme = localStorage.getItem("quire.theme") ?? "auto";
