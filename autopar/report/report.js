"use strict";

// Tables whose headings are buttons: a click sorts, another turns the order around.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const isNumber = head.classList.contains("number");
      const now = head.getAttribute("aria-sort");
      const order = now ? (now === "ascending" ? "descending" : "ascending")
                        : (isNumber ? "descending" : "ascending");
      const sign = order === "ascending" ? 1 : -1;
      const key = (row) => {
        const cell = row.cells[column];
        const text = cell.dataset.value ?? cell.textContent;
        if (!isNumber) return text;
        const number = parseFloat(text);
        return Number.isNaN(number) ? -Infinity : number;
      };
      const compare = (a, b) => (isNumber ? key(a) - key(b) : key(a).localeCompare(key(b)));
      const rows = [...table.tBodies[0].rows].sort((a, b) => sign * compare(a, b));
      table.tBodies[0].append(...rows);
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
    });
  });
}

for (const button of document.querySelectorAll("[data-open], [data-close]")) {
  const isOpen = "open" in button.dataset;
  const inside = document.getElementById(button.dataset.open ?? button.dataset.close);
  button.addEventListener("click", () => {
    for (const each of inside.querySelectorAll("details")) each.open = isOpen;
  });
}

async function loadPlotly() {
  const packed = atob(document.getElementById("plotly").textContent.trim());
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), tickcolor: colour("--line") };
  const font = { color: colour("--text"), size: 13, family: getComputedStyle(document.body).fontFamily };
  const hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--line"), font, align: "left" };
  return {
    ...layout, font, hoverlabel, autosize: true,
    xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis },
  };
}

async function drawFigures() {
  const plots = [...document.querySelectorAll(".plot")];
  const draw = () => Promise.all(plots.map((plot) => {
    const { data, layout } = JSON.parse(plot.dataset.figure);
    plot.style.height = `${layout.height}px`; // kept when the width changes
    return Plotly.react(plot, data, themed(layout), { displayModeBar: false, responsive: true });
  }));
  for (const plot of plots) plot.dataset.figure = plot.querySelector("script").textContent;
  try {
    await loadPlotly();
    for (const plot of plots) plot.replaceChildren();
    await draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  } catch (error) {
    for (const plot of plots) plot.textContent = `This browser cannot draw the figure: ${error}`;
  }
  document.documentElement.dataset.ready = "true";
}

drawFigures();
