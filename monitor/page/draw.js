// Puts a tree of values on the page and reuses its elements, so that focus, open details and scrolling survive each tick.
// Text is set as text, never as markup, because names and reasons come from jobs.

export function el(tag, attributes, ...children) {
  return { tag, attributes: attributes || {}, children: children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false) };
}

function same(node, wanted) {
  if (typeof wanted !== "object") return node.nodeType === Node.TEXT_NODE;
  return node.nodeType === Node.ELEMENT_NODE && node.localName === wanted.tag && (node.dataset.key || "") === String(wanted.attributes.key ?? "");
}

function setAttributes(node, attributes) {
  const names = new Set(["open"]); // the reader's choice
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "key") { names.add("data-key"); if (node.dataset.key !== String(value)) node.dataset.key = value; continue; }
    if (name === "style") {  // through the object model: the content security policy forbids style attributes
      names.add("style");
      for (const [key, text] of Object.entries(value)) if (node.style.getPropertyValue(key) !== text) node.style.setProperty(key, text);
      continue;
    }
    if (value === null || value === undefined || value === false) continue;
    names.add(name);
    const text = value === true ? "" : String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
  for (const { name } of [...node.attributes]) if (!names.has(name)) node.removeAttribute(name);
}

export function patch(parent, children) {
  let at = parent.firstChild;
  for (const wanted of children) {
    let node = at;
    if (node && !same(node, wanted)) {
      node = null;
      if (typeof wanted === "object" && wanted.attributes.key !== undefined) {
        for (let later = at.nextSibling; later; later = later.nextSibling) if (same(later, wanted)) { node = later; break; }
      }
    }
    if (!node) node = typeof wanted === "object" ? document.createElement(wanted.tag) : document.createTextNode("");
    if (node === at) at = at.nextSibling; else parent.insertBefore(node, at);
    if (typeof wanted === "object") { setAttributes(node, wanted.attributes); patch(node, wanted.children); }
    else if (node.data !== String(wanted)) node.data = String(wanted);
  }
  while (at) { const next = at.nextSibling; parent.removeChild(at); at = next; }
}

// Numbers.  Null means unknown and is written as a dash; zero is a measurement.

const DASH = "\u2013";
const known = (value) => value !== null && value !== undefined;

export function percent(ratio, digits = 0) { return known(ratio) ? `${(ratio * 100).toFixed(digits)} %` : DASH; }

export function number(value, digits = 0) { return known(value) ? value.toLocaleString("en", { maximumFractionDigits: digits }) : DASH; }

export function scaled(value, unit, base = 1000) {
  if (!known(value)) return DASH;
  const signs = base === 1024 ? ["", "Ki", "Mi", "Gi", "Ti", "Pi"] : ["", "k", "M", "G", "T", "P"];
  let step = 0;
  let left = Math.abs(value);
  while (left >= base && step < signs.length - 1) { left /= base; step += 1; }
  return `${value < 0 ? "-" : ""}${left.toFixed(left >= 100 || (step === 0 && Number.isInteger(left)) ? 0 : 1)} ${signs[step]}${unit}`;
}

export const bytes = (value) => scaled(value, "B", 1024);
export const rate = (value) => scaled(value, "B/s");

export function seconds(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} \u00B5s`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const words = (name) => (known(name) ? String(name).replaceAll("_", " ") : DASH);

export function meter(ratio) {
  if (!known(ratio)) return null;
  return el("span", { class: "meter", "aria-hidden": "true" }, el("i", { style: { width: `${Math.min(100, Math.max(0, ratio * 100)).toFixed(1)}%` } }));
}

// Returns a table; columns are {title, text (left-aligned), long, cell(row), sort(row), head}.

export function table(name, columns, rows, keyOf, sorting) {
  const head = columns.map((column) => {
    const order = sorting && sorting.by === column.title ? (sorting.down ? "descending" : "ascending") : null;
    const title = column.sort ? el("button", { type: "button", "data-table": name, "data-sort": column.title }, column.title) : column.title;
    return el("th", { scope: "col", class: column.text ? "text" : null, "aria-sort": order, key: column.title }, title);
  });
  const chosen = sorting && columns.find((column) => column.title === sorting.by && column.sort);
  const ordered = chosen ? [...rows].sort((a, b) => compare(chosen.sort(a), chosen.sort(b)) * (sorting.down ? -1 : 1)) : rows;
  return el("table", {},
    el("caption", { class: "quiet" }, name),
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, ordered.map((row) => el("tr", { key: keyOf(row) }, columns.map((column) => el(
      column.head ? "th" : "td",
      { class: [column.text ? "text" : "", column.long ? "long" : ""].join(" ").trim() || null, scope: column.head ? "row" : null },
      column.cell(row)))))));
}

function compare(a, b) {
  if (!known(a) || !known(b)) return known(a) - known(b);
  return a < b ? -1 : a > b ? 1 : 0;
}
