"use strict";
/* Tables of class "sortable": a click on the head of a column sorts the rows by it, a second click in the other
   direction. Tables of class "filtered" get a text box, which shows only rows that have all of its words. */
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
  const numeric = text => Number(text.replace(/[,%]/g, ""));
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const direction = head.ariaSort === "ascending" ? -1 : 1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.ariaSort = direction > 0 ? "ascending" : "descending";
      const values = new Map(rows.map(row => [row, value(row, column)]));
      const numbers = [...values.values()].every(text => !isNaN(numeric(text)));
      const compare = numbers ? (a, b) => numeric(a) - numeric(b) : (a, b) => a.localeCompare(b);
      /* Empty cells come last in both directions. */
      const empty = row => values.get(row) === "";
      rows.sort((a, b) => empty(a) - empty(b) || direction * compare(values.get(a), values.get(b)));
      body.append(...rows);
    });
  });
  if (!table.classList.contains("filtered")) continue;
  const bar = document.createElement("p"), box = document.createElement("input"), shown = document.createElement("span");
  bar.className = "filter quiet";
  box.type = "search";
  box.placeholder = box.ariaLabel = "filter rows";
  bar.append(box, shown);
  (table.closest(".rows") ?? table).before(bar);
  const texts = new Map(rows.map(row => [row, row.textContent.toLowerCase()]));
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every(word => texts.get(row).includes(word));
    const count = rows.filter(row => !row.hidden).length;
    shown.textContent = count < rows.length ? ` ${count} of ${rows.length} rows` : "";
  });
}
