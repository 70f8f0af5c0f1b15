// Curves: one small chart a metric, the runs in it as lines. All charts share the cursor.

const CHART = { width: 400, height: 178, left: 46, right: 10, top: 10, bottom: 22 };
const MAX_POINTS = 1500;
const charts = { list: [], axis: "iteration", smoothing: 0 };

/** A chart of `name` over `runs`; `update()` draws it anew, with the axis and smoothing that are set. */
function makeChart(name, runs) {
  const [unit, meaning] = runs.map((run) => run.legend[name]).find(Boolean) || ["", ""];
  const plot = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": name });
  const values = h("div", { class: "values num" });
  const element = h(
    "div",
    { class: "card chart", "data-metric": name },
    h("div", { class: "name" }, safeLine(name), unit ? h("span", { class: "unit" }, `  ${unit}`) : null),
    h("div", { class: "meaning", title: meaning }, meaning),
    plot,
    values,
  );
  const chart = { name, element, update, show };
  let series = [];
  let scale = null;
  const cursor = svg("line", { class: "cursor", y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden" });

  function update() {
    series = runs.filter((run) => run.shown && run.metrics[name]).map((run) => ({ run, points: points(run, name) }));
    series = series.filter(({ points }) => points.length);
    scale = fit(series.flatMap(({ points }) => points));
    plot.replaceChildren();
    element.classList.toggle("empty", !series.length);
    if (series.length) plot.append(...axes(scale), ...series.flatMap((one) => lines(one, scale)), cursor);
    show(null);
  }

  /** The values at x (a number of the axis), or the last ones. */
  function show(x) {
    if (!series.length) return values.replaceChildren(h("span", null, "no values"));
    cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) ["x1", "x2"].forEach((end) => cursor.setAttribute(end, scale.x(x)));
    const near = ({ points }) =>
      x === null ? points.at(-1) : points.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
    values.replaceChildren(
      ...series.map((one) => {
        const point = near(one);
        const where = `at ${charts.axis === "iteration" ? `iteration ${point.x}` : duration(point.x * 60)}`;
        return h("span", { title: where }, dot(`var(--run-${one.run.color})`), number(point.raw));
      }),
      h("span", null, x === null ? "last" : charts.axis === "iteration" ? `iteration ${x}` : `${number(x)} min`),
    );
  }

  plot.addEventListener("pointermove", (event) => {
    if (!series.length) return;
    const box = plot.getBoundingClientRect();
    const at = scale.value(((event.clientX - box.left) / box.width) * CHART.width);
    const all = series.flatMap(({ points }) => points);
    const x = all.reduce((a, b) => (Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a)).x;
    charts.list.forEach((other) => other.show(x));
  });
  plot.addEventListener("pointerleave", () => charts.list.forEach((other) => other.show(null)));
  charts.list.push(chart);
  return chart;
}

/** {x, y, raw} by x: raw as logged, y smoothed by an exponential mean whose start is corrected. */
function points(run, name) {
  const found = [];
  let mean = 0;
  let weight = 0;
  run.metrics[name].forEach((raw, i) => {
    if (raw === null) return;
    mean = charts.smoothing * mean + (1 - charts.smoothing) * raw;
    weight = charts.smoothing * weight + (1 - charts.smoothing);
    found.push({ x: charts.axis === "iteration" ? run.iterations[i] : run.minutes[i], y: mean / weight, raw });
  });
  const step = Math.ceil(found.length / MAX_POINTS);
  return found.filter((_, i) => i % step === 0 || i === found.length - 1);
}

/** Scales from values to the drawing and back. */
function fit(points) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { x, y, raw } of points) {
    [x0, x1] = [Math.min(x0, x), Math.max(x1, x)];
    [y0, y1] = [Math.min(y0, y, raw), Math.max(y1, y, raw)];
  }
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  if (y0 === y1) [y0, y1] = y0 === 0 ? [0, 1] : [y0 - Math.abs(y0) * 0.1, y1 + Math.abs(y1) * 0.1];
  if (y0 > 0 && y0 < 0.35 * y1) y0 = 0; // near zero, zero belongs to the picture
  const ticks = round(y0, y1, 4);
  if (ticks.at(-1) < y1 - 1e-9 * Math.abs(y1)) ticks.push(2 * ticks.at(-1) - ticks.at(-2));
  [y0, y1] = [ticks[0], ticks.at(-1)];
  const width = CHART.width - CHART.left - CHART.right;
  const height = CHART.height - CHART.top - CHART.bottom;
  return {
    x: (x) => CHART.left + ((x - x0) / (x1 - x0)) * width,
    y: (y) => CHART.top + (1 - (y - y0) / (y1 - y0)) * height,
    value: (at) => x0 + ((at - CHART.left) / width) * (x1 - x0),
    ticks,
    xTicks: round(x0, x1, 5).filter((x) => x >= x0 && x <= x1 && (charts.axis !== "iteration" || Number.isInteger(x))),
  };
}

/** About `count` round numbers from `low` or just below to `high` or just below. */
function round(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((s) => s >= rough) || rough;
  const found = [];
  for (let i = Math.floor(low / step + 1e-9); i * step <= high + step * 1e-6 && found.length < 12; i++)
    found.push(i * step);
  return found;
}

function axes(scale) {
  const right = CHART.width - CHART.right;
  const bottom = CHART.height - CHART.bottom;
  return [
    ...scale.ticks.flatMap((tick) => [
      svg("line", { class: "grid", x1: CHART.left, x2: right, y1: scale.y(tick), y2: scale.y(tick) }),
      svg(
        "text",
        { x: CHART.left - 7, y: scale.y(tick) + 3.5, "text-anchor": "end" },
        number(Number(tick.toPrecision(8))),
      ),
    ]),
    ...scale.xTicks.map((tick) =>
      svg("text", { x: scale.x(tick), y: bottom + 16, "text-anchor": "middle" }, number(Number(tick.toPrecision(8)))),
    ),
  ];
}

function lines({ run, points }, scale) {
  const path = (key) =>
    points.map((p, i) => `${i ? "L" : "M"}${scale.x(p.x).toFixed(1)} ${scale.y(p[key]).toFixed(1)}`).join("");
  const look = { "--color": `var(--run-${run.color})` };
  return [
    charts.smoothing ? svg("path", { class: "raw", d: path("raw"), ...look }) : null,
    svg("path", { class: "curve", d: path("y"), ...look }),
    ...(points.length <= 24
      ? points.map((p) => svg("circle", { cx: scale.x(p.x), cy: scale.y(p.y), r: 2.4, ...look }))
      : []),
  ].filter(Boolean);
}
