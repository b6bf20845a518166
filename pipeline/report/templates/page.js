"use strict";
// Shows what stands in the page as data: the pictures by plotly, the table of jobs by DataTables. Both take their
// colours from the page's style, in the scheme that the reader has, and again when that changes.
((DataTable) => {
  const dark = matchMedia("(prefers-color-scheme: dark)"), phone = matchMedia("(max-width: 600px)");
  const root = document.documentElement, parts = [...document.querySelectorAll("figure")];
  const figures = new Map(), drawn = new Set(); // for the screen as it is, by their parts; and those that are drawn
  const textOf = part => part.querySelector("script").textContent;

  // The figure with the values of the colours that it names, in a height and with names for the reader's screen.
  function figureOf(part) {
    const style = getComputedStyle(root), narrow = phone.matches;
    const {data, layout} = JSON.parse(textOf(part).replace(/"var\((--[\w-]+)\)"/g, (_, name) =>
      JSON.stringify(style.getPropertyValue(name).trim())));
    const {rows, panels} = layout.meta;
    const entries = data.filter(trace => layout.showlegend && trace.showlegend !== false).length;
    const row = narrow ? 48 : 28, least = narrow ? 260 : 340;
    layout.height = panels * (rows ? 64 + rows * row : panels > 1 ? 240 : least) + 24 + 22 * (narrow ? entries : 1);
    if (narrow) {
      layout.dragmode = false; // a finger that drags scrolls the page; the buttons zoom
      layout.annotations = Object.entries(layout).flatMap(([name, axis]) => name.startsWith("yaxis") ? nameAbove(name, axis) : []);
      for (const trace of data) if (trace.type === "box") trace.width = 0.4;
      if (layout.bargap) layout.bargap = 0.6;
    }
    return [part.querySelector("div"), data, layout,
      {responsive: true, displaylogo: false, displayModeBar: narrow || "hover", plotlyServerURL: "", // nothing is sent
        modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud"]}];
  }

  // The names of an axis's rows, each above its row: beside it there is no room on a phone.
  function nameAbove(name, axis) {
    const yref = name.replace("axis", ""), xref = `${yref.replace("y", "x")} domain`, names = axis.ticktext ?? [];
    if (axis.tickfont) axis.showticklabels = false;
    return names.map((text, row) => ({text, xref, yref, x: 0, y: row, xanchor: "left", yshift: 20, showarrow: false,
      font: axis.tickfont}));
  }

  async function draw(part) {
    drawn.add(part);
    inView.unobserve(part);
    const plot = await Plotly.react(...figures.get(part));
    plot.removeAllListeners("plotly_click").on("plotly_click", ({points: [{customdata}]}) => {
      if (customdata && matchMedia("(hover: hover)").matches) location.href = customdata; // a finger asks what it is
    });
  }

  // One picture after another, so that the page can be used meanwhile.
  async function drawEach(some) {
    for (const part of some) {
      await new Promise(done => setTimeout(done));
      await draw(part);
    }
  }

  // A picture is drawn when it is within a screen of what is seen. Its room is there before: nothing moves.
  const inView = new IntersectionObserver(
    entries => drawEach(entries.filter(({isIntersecting}) => isIntersecting).map(({target}) => target)),
    {rootMargin: "100% 0px"});

  function fitToScreen() {
    root.classList.toggle("dark", dark.matches);
    for (const part of parts) {
      const [plot, , {height}] = figures.set(part, figureOf(part)).get(part);
      plot.style.minHeight = `${height}px`;
    }
    drawEach([...drawn]); // more are drawn meanwhile
  }

  function tableOf(part) {
    const {columns, rows, many} = JSON.parse(textOf(part)), page = 100;
    // Where a cell says nothing the row comes last, whichever way it is sorted.
    const known = order => (a, b) => (a === null) - (b === null) || order * (a - b);
    Object.assign(DataTable.ext.type.order, {"known-asc": known(1), "known-desc": known(-1)});
    const api = new DataTable(part.querySelector("table"), {
      data: rows, pageLength: page, lengthChange: false, paging: rows.length > page, order: [], autoWidth: false,
      deferRender: true, orderClasses: false, orderDescReverse: false,
      buttons: [{extend: "colvis", text: "Columns", columns: columns.map((_, place) => place).slice(1)},
        {extend: "csvHtml5", text: "CSV", filename: "jobs", title: null, exportOptions: {orthogonal: "csv"}}],
      layout: {topStart: many ? "search" : null, topEnd: "buttons", bottomStart: many ? "info" : null,
        bottomEnd: rows.length > page ? "paging" : null},
      columns: columns.map(({numeric, choices}, place) => ({
        type: "known", className: numeric ? "number" : "words", cellType: place ? "td" : "th",
        data: null, render: (_, use, {[place]: [html, key, safe]}) => use === "sort" ? key : use === "csv" ? safe ?? html : html,
        ...(choices && many ? {columnControl: [["searchList"]]} : {}),
      })),
      language: {search: "Filter", info: "_START_ to _END_ of _TOTAL_ jobs", infoEmpty: "No jobs", zeroRecords: "",
        infoFiltered: "that match, of _MAX_"},
    });
    // What a screen has no room for is left out, details first, the last ones first; the button shows it.
    const box = part.querySelector(".dt-layout-table > div"), places = columns.map((_, place) => place).reverse();
    const detailed = kind => places.filter(place => columns[place].detail === kind);
    for (const place of [...detailed("aside"), ...detailed("more")])
      if (box.scrollWidth > box.clientWidth) api.column(place).visible(false);
  }

  const table = document.getElementById("table");
  if (table) tableOf(table);
  for (const each of [dark, phone]) each.addEventListener("change", fitToScreen);
  addEventListener("beforeprint", () => parts.filter(part => !drawn.has(part)).forEach(draw));
  fitToScreen();
  for (const part of parts) inView.observe(part);
})(DATATABLE);
