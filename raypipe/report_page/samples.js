// The sample browser: filters, a list, and the chosen sample in full.

const PAGE_SIZE = 100;
const SORTS = {
  iteration: ["newest first", (a, b) => b.iteration - a.iteration || b.score - a.score],
  best: ["best score first", (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)],
  worst: ["worst score first", (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity)],
  longest: ["longest first", (a, b) => b.response_length - a.response_length],
};

function makeBrowser(runs) {
  const all = runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run })));
  const chosen = { run: "", purpose: "", kind: "", status: "", source: "", sort: "iteration" };
  const [from, to] = [box("number", "first", reset), box("number", "last", reset)];
  const [low, high] = [box("number", "", reset, { step: "any" }), box("number", "", reset, { step: "any" })];
  const search = box("search", "in prompt, response, answer, id, error", reset);
  const list = h("div", { class: "card list", role: "listbox", "aria-label": "samples" });
  const detail = h("div", { class: "card detail" });
  const count = h("span", { class: "soft num", id: "sample-count" });
  let [found, shown, selected] = [[], 0, null];

  const values = (key) => [...new Set(all.map((sample) => sample[key]))].filter(Boolean).sort();
  const filters = h(
    "div",
    { class: "card filters" },
    labelled("text", search, "grow"),
    runs.length > 1
      ? labelled(
          "run",
          menu(
            "run",
            runs.map((run, i) => [String(i), safeLine(run.name, 40)]),
          ),
        )
      : null,
    labelled("iterations", h("span", null, from, " – ", to)),
    labelled("status", menu("status", values("status"))),
    labelled("kept as", menu("kind", values("kind"))),
    labelled("purpose", menu("purpose", values("purpose"))),
    values("data_source").length > 1 ? labelled("data source", menu("source", values("data_source"))) : null,
    labelled("score", h("span", null, low, " – ", high)),
    labelled(
      "order",
      menu(
        "sort",
        Object.entries(SORTS).map(([value, [label]]) => [value, label]),
        false,
      ),
    ),
  );
  const element = h("div", null, filters, h("div", { class: "browser" }, list, detail));

  function menu(key, options, any = true) {
    const pairs = options.map((option) => (Array.isArray(option) ? option : [option, safeLine(option, 40)]));
    const select = h(
      "select",
      { name: key },
      any ? h("option", { value: "" }, "all") : null,
      pairs.map(([value, label]) => h("option", { value }, label)),
    );
    select.addEventListener("change", () => {
      chosen[key] = select.value;
      reset();
    });
    return select;
  }

  function matches(sample) {
    const text = search.value.toLowerCase();
    const within = (value, least, most) =>
      (least === "" || (value !== null && value >= Number(least))) &&
      (most === "" || (value !== null && value <= Number(most)));
    return (
      sample.run.shown &&
      (!chosen.run || sample.run === runs[chosen.run]) &&
      (!chosen.status || sample.status === chosen.status) &&
      (!chosen.kind || sample.kind === chosen.kind) &&
      (!chosen.purpose || sample.purpose === chosen.purpose) &&
      (!chosen.source || sample.data_source === chosen.source) &&
      within(sample.iteration, from.value, to.value) &&
      within(sample.score, low.value, high.value) &&
      (!text || searchable(sample).includes(text))
    );
  }

  function reset() {
    found = all.filter(matches).sort(SORTS[chosen.sort][1]);
    shown = 0;
    list.replaceChildren();
    count.textContent = `${number(found.length)} of ${number(all.length)} samples`;
    more();
    if (found.length) open(found[0]);
    else detail.replaceChildren(h("div", { class: "soft" }, "No sample passes these filters."));
  }

  function more() {
    list.querySelector(".more")?.remove();
    list.append(...found.slice(shown, shown + PAGE_SIZE).map(item));
    shown = Math.min(found.length, shown + PAGE_SIZE);
    const left = found.length - shown;
    if (left) list.append(h("button", { type: "button", class: "plain more", onclick: more }, `${number(left)} more`));
  }

  function item(sample) {
    const first = sample.response.trim().split("\n", 1)[0] || sample.error || "(empty)";
    const button = h(
      "button",
      { type: "button", class: "item", role: "option", "aria-selected": "false", onclick: () => open(sample) },
      pill(sample),
      h("span", { class: "line" }, safeLine(first, 90)),
      h(
        "span",
        { class: "sub num" },
        runs.length > 1 ? dot(`var(--run-${sample.run.color})`) : null,
        [
          `iteration ${number(sample.iteration)}`,
          sample.purpose === "heldout" ? "held out" : safeLine(sample.kind),
          `${number(sample.response_length)} tokens`,
        ].join(" · "),
      ),
    );
    sample.button = button;
    return button;
  }

  function open(sample) {
    selected?.button?.setAttribute("aria-selected", "false");
    selected = sample;
    sample.button?.setAttribute("aria-selected", "true");
    detail.replaceChildren(...describe(sample, search.value.toLowerCase()));
    detail.scrollTop = 0;
  }

  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    const next = step && found[found.indexOf(selected) + step];
    if (!next) return;
    event.preventDefault();
    if (!next.button?.isConnected) more();
    open(next);
    next.button.focus();
  });
  return { element, count, reset };
}

function box(type, placeholder, changed, attributes = {}) {
  return h("input", { type, placeholder, oninput: changed, ...attributes });
}

function labelled(name, control, kind = "") {
  const label = h("label", { class: kind, "data-filter": name }, name, control);
  if (kind) control.style.width = "100%";
  return label;
}

/** Everything that a search looks at, in lower case; made once a sample. */
function searchable(sample) {
  const grades = sample.grades.map((grade) => `${grade.error} ${grade.values}`);
  const texts = [sample.prompt, sample.response, sample.ground_truth, sample.sample_id, sample.prompt_id, sample.error];
  return (sample.low ??= [...texts, ...grades].join("\n").toLowerCase());
}

/** A sample's score, the greener the higher it is among its run's; or why it has none. */
function pill(sample) {
  if (sample.status !== "ok" || sample.score === null) return statusPill(sample.status);
  const [low, high] = (sample.run.scores ??= span(sample.run.samples.map(({ score }) => score)));
  const share = high > low ? (sample.score - low) / (high - low) : 1;
  const shade = `color-mix(in srgb, var(--ok) ${Math.round(100 * share)}%, var(--abstain))`;
  return h("span", { class: "pill", "--color": shade }, number(sample.score));
}

function statusPill(status) {
  const known = ["ok", "abstain", "error", "timeout", "crash"].includes(status);
  return h(
    "span",
    { class: "pill", "--color": `var(--${known ? status : "abstain"})` },
    safeLine(status, 12) || "none",
  );
}

function span(numbers) {
  const known = numbers.filter((value) => value !== null);
  return [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
}

function describe(sample, search) {
  const block = (title, text, kind = "") =>
    text
      ? [h("h3", null, title), h("pre", { class: kind, dir: "auto", "--color": "var(--accent)" }, safe(text, search))]
      : [];
  const facts = [
    `run ${safeLine(sample.run.name, 60)}`,
    `iteration ${number(sample.iteration)}`,
    `${safeLine(sample.purpose)}, ${safeLine(sample.kind)}`,
    safeLine(sample.data_source),
    `prompt ${safeLine(sample.prompt_id)}, ${number(sample.prompt_length)} tokens`,
    `response ${number(sample.response_length)} tokens, ended by ${safeLine(sample.finish_reason)}`,
    sample.advantage === null ? null : `advantage ${number(sample.advantage)}`,
  ];
  return [
    h("div", { class: "title" }, pill(sample), h("b", null, safeLine(sample.sample_id, 80))),
    h(
      "div",
      { class: "meta num" },
      facts.filter(Boolean).map((fact) => h("span", null, fact)),
    ),
    ...block("Prompt", sample.prompt),
    ...block("Response", sample.response || "(empty)", "response"),
    ...block("Ground truth", sample.ground_truth),
    ...block("Generation failed", sample.error),
    ...(sample.grades.length ? [h("h3", null, "Grades"), gradeTable(sample.grades, search)] : []),
  ];
}

function gradeTable(grades, search) {
  const columns = ["grader", "status", "score", "weight", "seconds", "named values or error"];
  return h(
    "table",
    null,
    h(
      "tr",
      null,
      columns.map((name) => h("th", null, name)),
    ),
    grades.map((grade) =>
      h(
        "tr",
        null,
        h("td", null, safe(grade.grader)),
        h("td", null, statusPill(grade.status)),
        h("td", null, number(grade.score)),
        h("td", null, number(grade.weight)),
        h("td", null, grade.seconds === null ? "–" : duration(grade.seconds)),
        h("td", { class: "text" }, safe([grade.values, grade.error].filter(Boolean).join("\n"), search)),
      ),
    ),
  );
}
