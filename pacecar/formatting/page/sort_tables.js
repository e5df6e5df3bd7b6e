// Makes tables sortable: a button in each head; numbers sort by data-value, missing ones last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...(head.hasChildNodes() ? head.childNodes : ["order"]));
    head.append(button);
    button.addEventListener("click", () => {
      const key = (row) => {
        const cell = row.cells[place];
        return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
      };
      const isNumbers = [...body.rows].some((row) => typeof key(row) === "number");
      const was = head.getAttribute("aria-sort");
      const isUp = was ? was === "descending" : !isNumbers;
      const sign = isUp ? 1 : -1;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return sign * (typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true }));
      });
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      body.append(...rows);
    });
  });
}
