// The timeline of an iteration: a band a lane, its spans as bars, packed as in the trace file. Drag to zoom.

const LABEL = 118; // pixels left of the time axis
const BAND_GAP = 5;
const HEAD_HEIGHT = 22; // above the first lane of a stage
const AXIS_HEIGHT = 24;
const STAGE_WORDS = {
  Generate: "one bar a response; pale: cut by length",
  Grade: "one bar a sample; red: failed",
  Score: "one bar a sample",
  Learner: "grey: waiting; dark: new weights to the engines",
  Driver: "the run's own process",
};

function makeTimeline(run) {
  const canvas = h("canvas", { role: "img", "aria-label": `timeline of ${safeLine(run.name)}` });
  const tip = h("div", { class: "tip", hidden: "" });
  const hint = h("div", { class: "hint" });
  const choose = segmented(
    run.timelines.map((one, i) => [i, `${one.iteration}`]),
    0,
    select,
  );
  const element = h(
    "div",
    { class: "card timeline" },
    h(
      "div",
      { class: "top" },
      dot(`var(--run-${run.color})`),
      safeLine(run.name, 60),
      h("span", { class: "soft" }, "iteration"),
      choose,
    ),
    h("div", { class: "canvas" }, canvas, tip),
    hint,
  );
  let bands = [];
  let [whole, view, drag] = [[0, 1], [0, 1], null];

  function select(index) {
    const timeline = run.timelines[index];
    bands = layOut(timeline.lanes);
    whole = [0, Math.max(1, ...timeline.lanes.flatMap((lane) => lane.spans.map((span) => span[1] + span[2])))];
    view = whole;
    const advice = run.bounds.find(([iteration]) => iteration === timeline.iteration);
    const shown = timeline.lanes.reduce((sum, lane) => sum + lane.spans.length, 0);
    hint.replaceChildren(
      [
        advice ? `${safeLine(advice[2])}. ` : "",
        `${duration(whole[1] / 1000)} in all. Drag to zoom, double-click to go back.`,
      ].join(""),
      shown < timeline.spans_of ? ` The first ${number(shown)} of ${number(timeline.spans_of)} bars are shown.` : "",
    );
    draw();
  }

  function draw() {
    const width = canvas.parentElement.clientWidth || 1000;
    const last = bands.at(-1);
    const height = (last ? last.top + last.height : 0) + AXIS_HEIGHT;
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    canvas.style.height = `${height}px`;
    const paint = canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const colors = palette();
    const x = (ms) => LABEL + ((ms - view[0]) / (view[1] - view[0])) * (width - LABEL);
    paint.font = "11px system-ui, sans-serif";
    drawAxis(paint, colors, x, view, width, height);
    for (const band of bands) drawBand(paint, colors, x, band, width);
    if (drag) {
      paint.fillStyle = colors.shade;
      paint.fillRect(Math.min(drag.from, drag.to), 0, Math.abs(drag.to - drag.from), height - AXIS_HEIGHT);
    }
  }

  function time(pixel) {
    const width = canvas.clientWidth - LABEL;
    return view[0] + ((pixel - LABEL) / width) * (view[1] - view[0]);
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  canvas.addEventListener("pointerdown", (event) => {
    const [at] = point(event);
    drag = { from: Math.max(LABEL, at), to: Math.max(LABEL, at) };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [at, y] = point(event);
    if (drag) {
      drag.to = Math.max(LABEL, at);
      draw();
    }
    const span = spanAt(bands, time(at), y, (view[1] - view[0]) / canvas.clientWidth);
    tip.hidden = !span || at < LABEL;
    if (tip.hidden) return;
    const [, start, took, name, status] = span;
    const seconds = (ms) => `${(ms / 1000).toFixed(ms < 1000 ? 3 : 2)} s`;
    tip.replaceChildren(
      h("b", null, safeLine(name)),
      h("br"),
      `${seconds(start)} to ${seconds(start + took)}, ${seconds(took)}, ${safeLine(status)}`,
    );
    tip.style.left = `${Math.min(at + 14, canvas.clientWidth - 250)}px`;
    tip.style.top = `${y + 14}px`;
  });
  canvas.addEventListener("pointerup", () => {
    const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
    if (to - from > 4) view = [time(from), Math.min(time(to), whole[1])];
    drag = null;
    draw();
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("dblclick", () => {
    view = whole;
    draw();
  });
  new ResizeObserver(draw).observe(canvas.parentElement);
  return { run, element, draw, start: () => select(0) };
}

/** Lanes with their place: `top` and `height` in pixels, and `head` where a stage begins. */
function layOut(lanes) {
  let top = 0;
  return lanes.map((lane, i) => {
    const head = i === 0 || lanes[i - 1].stage !== lane.stage;
    top += head ? HEAD_HEIGHT + (i ? BAND_GAP : 0) : BAND_GAP;
    const height = Math.max(
      16,
      Math.min(lane.rows * 5, 260 / Math.sqrt(lanes.filter((other) => other.stage === lane.stage).length)),
    );
    const band = { ...lane, head, top, height, row: height / lane.rows };
    top += height;
    return band;
  });
}

function palette() {
  const names = [
    "Generate",
    "Grade",
    "Score",
    "Learner",
    "Driver",
    "length",
    "weights",
    "wait",
    "failed",
    "raised",
    "line",
    "ink",
    "soft",
    "card",
  ];
  return { ...Object.fromEntries(names.map((name) => [name, color(`--${name}`)])), shade: "rgb(37 99 201 / 18%)" };
}

const FAILED = ["failed", "error", "timeout", "crash"];

function barColor(colors, stage, [, , , name, status]) {
  if (FAILED.includes(status)) return colors.failed;
  if (stage === "Learner" && name.startsWith("wait")) return colors.wait;
  if (stage === "Learner" && name === "update weights") return colors.weights;
  return status === "length" ? colors.length : colors[stage];
}

function drawBand(paint, colors, x, band, width) {
  if (band.head) {
    paint.textAlign = "left";
    paint.font = "600 12px system-ui, sans-serif";
    paint.fillStyle = colors.ink;
    paint.fillText(band.stage, 0, band.top - 7);
    paint.font = "11px system-ui, sans-serif";
    paint.fillStyle = colors.soft;
    paint.fillText(STAGE_WORDS[band.stage], LABEL, band.top - 7);
  }
  paint.fillStyle = colors.raised;
  paint.fillRect(LABEL, band.top, width - LABEL, band.height);
  paint.fillStyle = colors.soft;
  paint.textAlign = "right";
  paint.fillText(safeLine(band.lane, 17), LABEL - 10, band.top + band.height / 2 + 4);
  const gap = band.row > 3 ? 1 : 0;
  for (const span of band.spans) {
    const left = Math.max(LABEL, x(span[1]));
    const right = Math.min(width, Math.max(x(span[1] + span[2]), x(span[1]) + 1.5));
    if (right <= LABEL || left >= width) continue;
    const top = band.top + span[0] * band.row;
    paint.fillStyle = barColor(colors, band.stage, span);
    paint.fillRect(left, top, Math.max(right - left - (right - left > 5 ? 0.8 : 0), 1), Math.max(band.row - gap, 0.7));
    if (band.rows <= 2 && right - left > 8 * span[3].length) {
      paint.textAlign = "center";
      paint.fillStyle = span[3].startsWith("wait") ? colors.soft : colors.card;
      paint.fillText(span[3], (left + right) / 2, top + band.row / 2 + 4);
    }
  }
}

function drawAxis(paint, colors, x, [from, to], width, height) {
  paint.strokeStyle = colors.line;
  paint.fillStyle = colors.soft;
  paint.textAlign = "center";
  for (const seconds of round(from / 1000, to / 1000, 9)) {
    const at = x(seconds * 1000);
    if (at < LABEL || at > width - 12) continue;
    paint.beginPath();
    paint.moveTo(at, 0);
    paint.lineTo(at, height - AXIS_HEIGHT);
    paint.stroke();
    paint.fillText(`${Number(seconds.toPrecision(6))} s`, Math.max(at, LABEL + 8), height - 8);
  }
}

/** The span under a point; a short one also a little beside it. `slack` is a pixel in ms. */
function spanAt(bands, ms, y, slack) {
  const band = bands.find(({ top, height }) => y >= top && y < top + height);
  if (!band) return null;
  const row = Math.floor((y - band.top) / band.row);
  const here = band.spans.filter(
    (span) => span[0] === row && ms >= span[1] - 2 * slack && ms <= span[1] + span[2] + 2 * slack,
  );
  return here.find((span) => ms >= span[1] && ms <= span[1] + span[2]) || here[0] || null;
}
