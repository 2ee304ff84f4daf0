"use strict";
document.getElementById("no-script").remove();
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const themes = read("themes");
const charts = read("charts");
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const current = () => root.dataset.theme || (dark.matches ? "dark" : "light");

// Storage may be forbidden for files; the theme is then chosen anew each time.
const remember = (theme) => { try { localStorage.setItem("cmcl-theme", theme); } catch { /* not kept */ } };
const remembered = () => { try { return localStorage.getItem("cmcl-theme"); } catch { return null; } };

// Names such as "@ink" in a chart stand for the theme's colours.
const filled = (value, theme) => {
  if (Array.isArray(value)) return value.map((entry) => filled(entry, theme));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, filled(entry, theme)]));
  }
  return typeof value === "string" && value[0] === "@" ? theme[value.slice(1)] ?? value : value;
};

const drawn = new Map();
async function draw() {
  const theme = themes[current()];
  for (const place of document.querySelectorAll("[data-chart]")) {
    drawn.get(place)?.finalize();
    // ast: expressions are interpreted, so that the page needs no eval
    const options = { actions: false, renderer: "svg", config: theme.config, ast: true };
    drawn.set(place, await vegaEmbed(place, filled(charts[place.dataset.chart], theme), options));
  }
  root.dataset.drawn = current();
}

const toggle = document.getElementById("theme");
function show() {
  const other = current() === "dark" ? "light" : "dark";
  toggle.textContent = other === "dark" ? "Dark" : "Light";
  toggle.setAttribute("aria-label", `Switch to the ${other} theme`);
  draw();
}
toggle.hidden = false;
toggle.addEventListener("click", () => {
  root.dataset.theme = current() === "dark" ? "light" : "dark";
  remember(root.dataset.theme);
  show();
});
dark.addEventListener("change", show);
if (themes[remembered()]) root.dataset.theme = remembered();
show();

// What has no number to sort by (not measured) stays at the end, whichever way.
function sort(head) {
  const row = head.parentElement;
  const column = [...row.children].indexOf(head);
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of row.children) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = head.closest("table").tBodies[0];
  const numeric = head.classList.contains("number");
  const key = (tr) => {
    const cell = tr.children[column];
    return numeric ? Number(cell.dataset.sort ?? "NaN") : cell.textContent.trim();
  };
  const compare = (a, b) => {
    if (!numeric) return (up ? 1 : -1) * a.localeCompare(b, "en", { numeric: true });
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    return up ? a - b : b - a;
  };
  body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
}
document.addEventListener("click", (event) => {
  const head = event.target.closest("th[aria-sort]");
  if (head && event.target.closest("button")) sort(head);
});

function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
  }
}
addEventListener("hashchange", unfold);
unfold();
