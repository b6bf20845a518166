"use strict";
// The table of jobs: sorts by a column, filters by words and choices, and shows one page of rows at a time, since a
// browser lays out some hundred rows at once and not thousands. The first page stands in the document as it is here.
document.documentElement.classList.add("scripted");
addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("jobs");
  if (!table) return;
  const {page, missing, links, reasons, columns} = JSON.parse(document.getElementById("rows").textContent);
  const headings = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const filter = document.getElementById("filter"), choices = [...document.querySelectorAll("select[data-column]")];
  const shown = document.getElementById("shown"), before = document.getElementById("before");
  const after = document.getElementById("after");
  const collator = new Intl.Collator("en", {numeric: true}), count = number => number.toLocaleString("en");
  const every = links.map((_, row) => row), texts = [];
  let matching = every, sorted = null, descending = false, first = 0;

  // All that a row says, to be looked for in.
  const text = row => texts[row] ??= columns.map(column => column.cells[row]).join("\n").toLowerCase();

  // What a row is sorted by: null where the cell says nothing, so that it comes last either way.
  function key(column, row) {
    if (column.values) return column.values[row];
    return column.cells[row] === missing ? null : column.cells[row];
  }

  function compare(column) {
    const ahead = column.values ? (a, b) => a - b : collator.compare, sign = descending ? -1 : 1;
    return (one, other) => {
      const a = key(column, one), b = key(column, other);
      if (a === null || b === null) return (a === null) - (b === null) || one - other;
      return sign * ahead(a, b) || one - other;
    };
  }

  function linked(text, target) {
    const link = document.createElement("a");
    link.href = target;
    link.textContent = text;
    return link;
  }

  function cellOf(column, place, row) {
    const cell = document.createElement(place ? "td" : "th"), words = column.cells[row];
    if (!place) cell.scope = "row";
    if (column.values) cell.className = "number";
    else if (words.length > 30) [cell.className, cell.title] = ["words", words];
    const target = !place ? links[row] : column.title === "status" && reasons[row] ? `#failure-${reasons[row]}` : "";
    cell.append(target ? linked(words, target) : words);
    return cell;
  }

  function rowOf(row) {
    const line = document.createElement("tr");
    line.append(...columns.map((column, place) => cellOf(column, place, row)));
    return line;
  }

  function show() {
    const rows = matching.slice(first, first + page);
    body.replaceChildren(...rows.map(rowOf));
    tell(rows.length);
  }

  function tell(length) {
    if (!shown) return;
    const all = `${count(every.length)} jobs`, span = `${count(first + 1)} to ${count(first + length)} of `;
    const of = matching.length < every.length ? `${count(matching.length)} that match, of ${all}` : all;
    shown.textContent = !length ? `No job matches, of ${all}.` : `${length < matching.length ? span : ""}${of}.`;
    before.hidden = after.hidden = matching.length <= page;
    before.disabled = first === 0;
    after.disabled = first + length >= matching.length;
  }

  function select() {
    const words = (filter?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = choices.filter(each => each.value).map(each => [columns[each.dataset.column], each.value]);
    matching = every.filter(row => words.every(word => text(row).includes(word)) &&
      chosen.every(([column, value]) => column.cells[row] === value));
    if (sorted !== null) matching.sort(compare(columns[sorted]));
    first = 0;
    show();
  }

  function sort(place) {
    const was = sorted === place ? headings[place].ariaSort : "none";
    for (const heading of headings) heading.ariaSort = "none";
    sorted = was === "descending" ? null : place;
    descending = was === "ascending";
    headings[place].ariaSort = {none: "ascending", ascending: "descending", descending: "none"}[was];
    select();
  }

  function turn(step) {
    first += step * page;
    show();
    table.parentElement.scrollTop = 0;
  }

  headings.forEach((heading, place) => heading.firstElementChild.addEventListener("click", () => sort(place)));
  filter?.addEventListener("input", select);
  for (const each of choices) each.addEventListener("change", select);
  before?.addEventListener("click", () => turn(-1));
  after?.addEventListener("click", () => turn(1));
  tell(Math.min(page, every.length));
});
