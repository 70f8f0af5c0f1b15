// Elements, numbers and safe text. Everything that the page shows is made here or by `textContent`: no markup is ever
// made from a string, and the page's Content-Security-Policy would not let it.

/** An element: h("td", {class: "right", onclick: f, "--color": "red"}, "text", child, ...). Null is left out. */
function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name === "width%") element.style.width = `${value}%`;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// Characters that cannot be seen, or that steer what can: controls, bidirectional marks, lone surrogates, separators.
// Line ends and tabs are shown as they are; the joiners belong to scripts and emoji.
const UNSEEN = /(?![\n\t\u200c\u200d])([\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Co}\p{Cn}])\1*/gu;

/** Text as nodes in which each run of unseen characters is a small label, e.g. \u202e or \x00 x 5. */
function safe(text, search = "") {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(UNSEEN)) {
    nodes.push(...marked(text.slice(from, found.index), search));
    const count = found[0].length / found[1].length;
    nodes.push(h("span", { class: "esc" }, escaped(found[1]) + (count > 1 ? ` x ${count}` : "")));
    from = found.index + found[0].length;
  }
  nodes.push(...marked(text.slice(from), search));
  return nodes;
}

/** The same as plain text on one line, for labels and options. */
function safeLine(text, most = 200) {
  const cut = text.length > most ? text.slice(0, most) + "…" : text;
  return cut.replace(/[\n\t]+/g, " ").replace(UNSEEN, (_, character) => escaped(character));
}

function escaped(character) {
  const code = character.codePointAt(0);
  const digits = code.toString(16);
  if (code < 0x100) return `\\x${digits.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

/** Text in which the places of `search` are marked; at most 500 of them. */
function marked(text, search) {
  if (!text) return [];
  if (!search) return [text];
  const low = text.toLowerCase();
  if (low.length !== text.length) return [text]; // a letter whose lower case is longer: places would be off
  const nodes = [];
  let from = 0;
  for (let at = low.indexOf(search); at >= 0 && nodes.length < 1000; at = low.indexOf(search, from)) {
    nodes.push(text.slice(from, at), h("mark", null, text.slice(at, at + search.length)));
    from = at + search.length;
  }
  return [...nodes, text.slice(from)];
}

/** 0.1234, 12.3, 1,234, 1.2e-5, 3.4M */
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(3)));
}

/** 0.2 ms, 0.42 s, 12.3 s, 4 min 05 s, 3 h 20 min */
function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds !== 0 && Math.abs(seconds) < 0.1) return `${number(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  const minutes = Math.round(whole / 60);
  return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

function percent(fraction) {
  return fraction === null || fraction === undefined ? "–" : `${Math.round(fraction * 100)}%`;
}

function dot(color) {
  return h("i", { class: "dot", "--color": color });
}

/** Buttons of which one is pressed; `choose` gets its value. */
function segmented(options, chosen, choose) {
  const buttons = options.map(([value, label]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => press(value) }, label),
  );
  function press(value) {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === value)));
    choose(value);
  }
  return h("span", { class: "segmented", role: "group" }, buttons);
}

/** A color of style.css as a value that a canvas takes. */
function color(name) {
  const probe = h("i", { hidden: "" });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
