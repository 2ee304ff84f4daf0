"use strict";
document.getElementById("no-script").remove();
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const themes = ["light", "dark"];
const current = () => root.dataset.theme || themes[Number(dark.matches)];

// Storage may be forbidden for files; the theme is then chosen anew each time.
const remember = (theme) => { try { localStorage.setItem("cmcl-theme", theme); } catch { /* not kept */ } };
const remembered = () => { try { return localStorage.getItem("cmcl-theme"); } catch { return null; } };

const toggle = document.getElementById("theme");
function label() {
  const other = themes[Number(current() === "light")];
  toggle.textContent = other === "dark" ? "Dark" : "Light";
  toggle.setAttribute("aria-label", `Switch to the ${other} theme`);
}
if (themes.includes(remembered())) root.dataset.theme = remembered();
toggle.hidden = false;
toggle.addEventListener("click", () => {
  root.dataset.theme = themes[Number(current() === "light")];
  remember(root.dataset.theme);
  label();
});
dark.addEventListener("change", label);
label();

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

// Cards are shown if they have the pressed kind and the chosen label.
function filter(filters) {
  const kind = filters.querySelector("[aria-pressed=true]").dataset.kind;
  const name = filters.querySelector("select")?.value ?? "";
  for (const card of filters.parentElement.querySelectorAll(".card")) {
    card.hidden = Boolean((kind && card.dataset.kind !== kind) || (name && card.dataset.label !== name));
  }
}

function enlarge(button) {
  const dialog = document.getElementById("large");
  dialog.querySelector("img").replaceWith(button.querySelector("img").cloneNode());
  dialog.querySelector("p").textContent = button.dataset.caption;
  dialog.showModal();
}

// A file in a browser may be denied the clipboard: the text is then selected, ready to be copied.
async function copy(button) {
  const text = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(text);
    button.textContent = "Selected";
  }
}

for (const part of document.querySelectorAll(".filters, .copy")) part.hidden = false;
document.querySelectorAll(".filters").forEach(filter);
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const head = button.closest("th[aria-sort]");
  if (head) sort(head);
  if (button.dataset.kind !== undefined) {
    for (const one of button.parentElement.querySelectorAll("button")) one.setAttribute("aria-pressed", one === button);
    filter(button.parentElement);
  }
  if (button.dataset.caption) enlarge(button);
  if (button.classList.contains("copy")) copy(button);
});
for (const select of document.querySelectorAll(".filters select")) {
  select.addEventListener("change", () => filter(select.closest(".filters")));
}

const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const text = event.target.closest?.(".chart [data-tip]")?.dataset.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text.replaceAll("; ", "\n");
  const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
  tip.style.cssText = `white-space: pre; left: ${left}px; top: ${event.clientY + 14}px`;
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
root.dataset.ready = "";
