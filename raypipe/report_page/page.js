// The page: what it holds, from top to bottom.

const COLORS = 8;
// Curves that are shown at once, by group; all others are under "more".
const GROUPS = [
  ["Reward", /^reward\/(mean|heldout_mean|std|[^/]+)$/, /^reward\/heldout_samples$/],
  ["Policy", /^(policy\/(kl|entropy|clip_frac)|ref\/kl|grad_norm|lr|critic\/(loss|explained_variance))$/],
  ["Responses", /^(response\/(length_mean|truncated_frac)|group\/all_equal_frac)$/],
  ["Pipeline", /^(efficiency|tokens_per_s|time\/iteration_s|lag\/graded_p95_s|idle\/.+|overlap\/grading_hidden_frac)$/],
  ["Engines against learner", /^(mismatch\/(kl|max)|staleness\/mean)$/],
];

const report = JSON.parse(document.getElementById("data").textContent);
const runs = report.runs.map((run, i) => ({ ...run, color: i % COLORS, shown: true, minutes: minutesOf(run) }));

/** Minutes since the run's start, at the end of each iteration. */
function minutesOf(run) {
  let sum = 0;
  return run.iterations.map((_, i) => (sum += (run.metrics["time/iteration_s"]?.[i] || 0) / 60));
}

function values(run, name) {
  return (run.metrics[name] || []).filter((value) => value !== null);
}

function curves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  const taken = new Set();
  const content = [];
  for (const [title, shown, but] of GROUPS) {
    const own = names.filter((name) => shown.test(name) && !but?.test(name) && !taken.has(name));
    own.forEach((name) => taken.add(name));
    if (own.length) content.push(h("h3", null, title), grid(own.sort(byRank(shown))));
  }
  const rest = names.filter((name) => !taken.has(name));
  if (rest.length)
    content.push(h("details", { id: "more-curves" }, h("summary", null, `${rest.length} more curves`), grid(rest)));
  if (!names.length) content.push(h("div", { class: "none" }, "No iteration has ended yet."));
  const redraw = () => charts.list.forEach((chart) => chart.update());
  const axis = segmented(
    [
      ["iteration", "iterations"],
      ["time", "minutes"],
    ],
    "iteration",
    (value) => {
      charts.axis = value;
      redraw();
    },
  );
  const smooth = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, "aria-label": "smoothing" });
  smooth.addEventListener("input", () => {
    charts.smoothing = Number(smooth.value);
    redraw();
  });
  const search = h("input", { type: "search", placeholder: "find a curve", "aria-label": "find a curve" });
  search.addEventListener("input", () => {
    for (const chart of charts.list)
      chart.element.hidden = !chart.name.toLowerCase().includes(search.value.toLowerCase());
    if (search.value) document.getElementById("more-curves")?.setAttribute("open", "");
  });
  return section("curves", "Curves", [search, h("label", null, "smoothing ", smooth), axis], content);
}

/** Mean and held-out reward come first; else by name. */
function byRank() {
  const first = ["reward/heldout_mean", "reward/mean"];
  return (a, b) => first.includes(b) - first.includes(a) || a.localeCompare(b);
}

function grid(names) {
  return h(
    "div",
    { class: "charts" },
    names.map((name) => makeChart(name, runs).element),
  );
}

function timelines() {
  const made = runs.filter((run) => run.timelines.length).map(makeTimeline);
  const none = h("div", { class: "none" }, "No timeline was drawn; log.timelines names the iterations that get one.");
  const element = section(
    "timelines",
    "Timelines",
    "who was busy when",
    made.length ? made.map((one) => one.element) : none,
  );
  return { element, made };
}

function samples() {
  const browser = makeBrowser(runs);
  const held = runs.reduce((sum, run) => sum + run.samples.length, 0);
  const there = runs.reduce((sum, run) => sum + run.samples_of, 0);
  const note = held < there ? ` (of ${number(there)} in the run folders, those of evenly spaced iterations)` : "";
  const none = h("div", { class: "none" }, "No samples were saved; log.samples says how many an iteration.");
  return {
    element: section("samples", "Samples", [browser.count, note], held ? browser.element : none),
    reset: held ? browser.reset : () => {},
  };
}

function configs() {
  return section(
    "configs",
    "Configuration",
    "",
    runs.map((run) =>
      h(
        "details",
        null,
        h("summary", null, dot(`var(--run-${run.color})`), ` ${safeLine(run.name, 80)}  ${safeLine(run.path)}`),
        h("pre", { class: "card config" }, safe(run.config)),
      ),
    ),
  );
}

function build() {
  const lines = timelines();
  const browser = samples();
  const redraw = () => {
    charts.list.forEach((chart) => chart.update());
    lines.made.forEach(({ run, element, draw }) => {
      element.hidden = !run.shown;
      draw();
    });
    browser.reset();
  };
  const chips = runs.map((run) => {
    const chip = h(
      "button",
      { type: "button", class: "chip", "aria-pressed": "true", title: run.path },
      dot(`var(--run-${run.color})`),
      h("span", null, safeLine(run.name, 60)),
    );
    chip.addEventListener("click", () => {
      run.shown = !run.shown;
      chip.setAttribute("aria-pressed", String(run.shown));
      redraw();
    });
    return chip;
  });
  const theme = h("button", { type: "button", class: "plain", id: "theme", title: "light or dark" }, "◐");
  theme.addEventListener("click", () => {
    const dark =
      document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
    lines.made.forEach(({ draw }) => draw());
  });
  const links = ["overview", "curves", "stages", "timelines", "graders", "samples", "configs"];
  document.getElementById("top").append(
    h("span", { class: "brand" }, "raypipe ", h("span", null, "report")),
    h(
      "nav",
      null,
      links.map((id) => h("a", { href: `#${id}` }, id[0].toUpperCase() + id.slice(1))),
    ),
    h("span", { class: "runs" }, runs.length > 1 ? chips : null, theme),
  );
  document
    .getElementById("main")
    .append(overview(), curves(), stages(), lines.element, graders(), browser.element, configs());
  document.title = `${runs.map((run) => safeLine(run.name, 30)).join(", ")} · raypipe report`;
  lines.made.forEach(({ start }) => start());
  redraw();
}

build();
