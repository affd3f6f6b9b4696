// Runs before the page is drawn, so that the other theme does not flash.
document.documentElement.dataset.theme = localStorage.getItem("quire.theme") ?? "auto";
