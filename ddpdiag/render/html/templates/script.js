"use strict";
// Only comfort: the page says all it has to say without this.
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copies) ?? button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      getSelection().selectAllChildren(source);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
function worth(cell) {
  const text = cell.dataset.sort ?? cell.textContent;
  const number = Number(text);
  return text.trim() !== "" && Number.isFinite(number) ? number : text;
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b, "en", { numeric: true });
}
for (const table of document.querySelectorAll("table[data-sortable]")) {
  table.querySelectorAll("thead th").forEach((head, place) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].sort((a, b) => compare(worth(a.cells[place]), worth(b.cells[place])));
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}
for (const input of document.querySelectorAll("input[data-filters]")) {
  const line = input.closest(".filter");
  line.hidden = false;
  input.addEventListener("input", () => {
    const rows = [...document.getElementById(input.dataset.filters).tBodies[0].rows];
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    const shown = rows.filter((row) => !row.hidden).length;
    line.querySelector("[role=status]").textContent = wanted ? `${shown} of ${rows.length}` : "";
  });
}
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const details of unfolded) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of unfolded) details.open = false;
});
