// A card a run: its key figures, what its stages did, and how its graders ended.

function section(id, title, tools, ...content) {
  return h(
    "section",
    { id },
    h("div", { class: "head" }, h("h2", null, title), h("span", { class: "tools" }, tools)),
    content,
  );
}

function overview() {
  return section("overview", "Overview", `made ${report.made}`, h("div", { class: "overview" }, runs.map(runCard)));
}

function runCard(run) {
  const ends = (name) => [values(run, name)[0], values(run, name).at(-1)];
  const total = (name) => values(run, name).reduce((sum, value) => sum + value, 0);
  const middle = (name) => values(run, name).sort((a, b) => a - b)[values(run, name).length >> 1];
  const big = (label, name) => {
    const [first, last] = ends(name);
    if (first === undefined) return null;
    return h(
      "div",
      null,
      h("div", { class: "value num" }, h("small", null, `${number(first)} → `), number(last)),
      h("div", { class: "soft" }, label),
    );
  };
  const facts = [
    ["iterations", number(run.iterations.length)],
    ["samples", number(total("samples"))],
    ["time", duration(total("time/iteration_s"))],
    ["an iteration", duration(middle("time/iteration_s") ?? null)],
    ["efficiency", percent(middle("efficiency"))],
    ["lag to grade p95", duration(middle("lag/graded_p95_s") ?? null)],
    ["tokens/s", number(middle("tokens_per_s"))],
    ["mismatch max", number(values(run, "mismatch/max").reduce((a, b) => Math.max(a, b), -Infinity))],
  ];
  const advice = commonAdvice(run);
  return h(
    "div",
    { class: "card", "data-run": run.name },
    h(
      "div",
      { class: "title" },
      dot(`var(--run-${run.color})`),
      h("span", null, safeLine(run.name, 80)),
      h("span", { class: "soft" }, endOf(run)),
    ),
    h("div", { class: "big" }, big("held-out reward", "reward/heldout_mean"), big("training reward", "reward/mean")),
    h(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
    ),
    advice ? h("p", { class: "advice" }, h("b", null, "What bounds: "), advice) : null,
  );
}

function endOf(run) {
  const wanted = /^ {2}iterations: (\d+)$/m.exec(run.config)?.[1];
  const trained = values(run, "reward/mean").length;
  return wanted ? `${trained} of ${wanted} iterations` : "";
}

function stages() {
  const cards = runs
    .filter((run) => run.stages.length)
    .map((run) => {
      const efficiency = values(run, "efficiency").sort((a, b) => a - b);
      return h(
        "div",
        { class: "card panel", "data-stages": run.name },
        h("div", { class: "title" }, dot(`var(--run-${run.color})`), safeLine(run.name, 60)),
        h(
          "table",
          null,
          h(
            "tr",
            null,
            ["stage", "busy", "", "at work", "bounds"].map((name, i) => h("th", { class: i > 2 ? "right" : "" }, name)),
          ),
          run.stages.map((row) =>
            h(
              "tr",
              null,
              h("td", null, row.stage),
              h(
                "td",
                null,
                h(
                  "div",
                  { class: "bar" },
                  h("i", { "width%": 100 * (1 - row.idle), "--color": `var(--${row.stage})` }),
                ),
              ),
              h("td", { class: "right" }, percent(1 - row.idle)),
              h("td", { class: "right" }, duration(row.seconds)),
              h("td", { class: "right" }, run.bounds.length ? `${row.bounds} of ${run.bounds.length}` : "–"),
            ),
          ),
        ),
        h(
          "p",
          { class: "advice" },
          h("b", null, `Efficiency ${percent(efficiency[efficiency.length >> 1])}`),
          ": the busiest resource's share of an iteration. ",
          commonAdvice(run),
        ),
      );
    });
  return section(
    "stages",
    "Stages",
    "medians over the iterations",
    cards.length ? h("div", { class: "panels" }, cards) : h("div", { class: "none" }, "No stage has been timed yet."),
  );
}

/** The advice of the last iteration that the most frequent bounding stage bounded. */
function commonAdvice(run) {
  const often = {};
  run.bounds.forEach(([, stage]) => (often[stage] = (often[stage] || 0) + 1));
  const stage = Object.keys(often).sort((a, b) => often[b] - often[a])[0];
  const found = run.bounds.filter(([, bounding]) => bounding === stage).at(-1);
  return found ? `${safeLine(found[2], 400)} (iteration ${found[0]})` : "";
}

function graders() {
  const statuses = ["ok", "abstain", "error", "timeout", "crash"];
  const cards = runs
    .filter((run) => run.graders.length)
    .map((run) =>
      h(
        "div",
        { class: "card panel", "data-graders": run.name },
        h("div", { class: "title" }, dot(`var(--run-${run.color})`), safeLine(run.name, 60)),
        h(
          "table",
          null,
          h(
            "tr",
            null,
            ["grader", "statuses", "ok", "not ok", "mean score"].map((name, i) =>
              h("th", { class: i > 1 ? "right" : "" }, name),
            ),
          ),
          run.graders.map((row) => {
            const total = Object.values(row.statuses).reduce((a, b) => a + b, 0);
            const others = statuses.slice(1).filter((name) => row.statuses[name]);
            return h(
              "tr",
              null,
              h("td", null, safeLine(row.grader, 60)),
              h(
                "td",
                null,
                h(
                  "div",
                  { class: "bar" },
                  statuses
                    .filter((name) => row.statuses[name])
                    .map((name) =>
                      h("i", {
                        "width%": (100 * row.statuses[name]) / total,
                        "--color": `var(--${name})`,
                        title: name,
                      }),
                    ),
                ),
              ),
              h("td", { class: "right" }, percent((row.statuses.ok || 0) / total)),
              h(
                "td",
                { class: "right soft" },
                others.map((name) => `${number(row.statuses[name])} ${name}`).join(", ") || "–",
              ),
              h("td", { class: "right" }, `${number(row.first)} → ${number(row.last)}`),
            );
          }),
        ),
      ),
    );
  const legend = h(
    "span",
    { class: "legend" },
    statuses.map((name) => h("span", null, dot(`var(--${name})`), name)),
  );
  return section(
    "graders",
    "Graders",
    legend,
    cards.length ? h("div", { class: "panels" }, cards) : h("div", { class: "none" }, "No sample has been graded yet."),
  );
}
