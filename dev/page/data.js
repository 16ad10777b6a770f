// What both pages share: elements, and the recorded launches that record.py has written, with their
// numbers at each time and the accesses of their threads. A time is the index of a launch: the state
// behind it; -1 is before the first.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const {sizes, tensors, launches, arenas} = page;

// ---- Elements

const $ = (id) => document.getElementById(id);
const range = (count) => [...Array(Math.max(0, count)).keys()];
const SVG = new Set(["svg", "circle", "line", "polyline", "text", "title"]);

// An element: h("button", {onclick: f}, "text", another element).
function h(tag, attributes = {}, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag)
                               : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function button(text, onclick, more = {}) {
  return h("button", {type: "button", onclick, ...more}, text);
}

// A choice: options are [value, text].
function select(label, options, chosen, onchange) {
  return h("select", {"aria-label": label, onchange: (event) => onchange(event.target.value)},
    ...options.map(([value, text]) => h("option", {value, selected: value === chosen}, text)));
}

// A part that scrolls by itself, for the keyboard too.
function scrolling(label, ...children) {
  return h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": label}, ...children);
}

// A table; a cell is a text, an element, or {text, class}.
function tableOf(caption, titles, rows, kind = "plain") {
  const cell = (x) => x.text === undefined || x instanceof Node ? h("td", {}, x)
                                                               : h("td", {class: x.class}, x.text);
  return scrolling(caption, h("table", {class: kind}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ...titles.map((title) => h("th", {scope: "col"}, title)))),
    h("tbody", {}, ...rows.map(([first, ...rest]) =>
      h("tr", {}, h("th", {scope: "row"}, first), ...rest.map(cell))))));
}

function legend(...parts) {
  return h("p", {class: "legend"}, ...parts.map(([color, text]) =>
    h("span", {}, h("i", {style: `background:var(--${color})`}), text)));
}

let dark = matchMedia("(prefers-color-scheme: dark)").matches;
$("theme").addEventListener("click", () => {
  dark = !dark;
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
});

// ---- Numbers

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
const floats = new Float32Array(bytesOf(page.values || "").buffer);
const ints = new Int32Array(floats.buffer);

function shown(x, digits = 4) {
  if (Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return `${x}`;
  const size = Math.abs(x);
  return size >= 1e-4 && size < 1e5 ? `${+x.toPrecision(digits)}` : x.toExponential(digits - 2);
}

// ---- Tensors: {name, arena, layer, shape, start, words, kind}

const writesOf = tensors.map(() => []);  // of each tensor [{launch, low, high, at}]
const readsOf = tensors.map(() => []);  // [index of a launch]
launches.forEach((launch, i) => {
  for (const [number, low, high, at] of launch.writes) {
    writesOf[number].push({launch: i, low, high, at});
  }
  for (const number of launch.reads) readsOf[number].push(i);
});
tensors.forEach((tensor, i) => { tensor.number = i; });
const tensorsOf = arenas.map((_, a) => tensors.filter((tensor) => tensor.arena === a));

// The tensor that has a word of an arena.
function tensorAt(arena, word) {
  return tensorsOf[arena].find((t) => word >= t.start && word < t.start + t.words);
}

const PREFIX = {gradients: "d", "adam m": "m of ", "adam v": "v of "};
// "dqkvw of layer 1", or of one of its numbers "dqkvw[3,5] of layer 1".
function nameOf(tensor, index = "") {
  const layer = tensor.layer === null ? "" : ` of layer ${tensor.layer}`;
  return (PREFIX[arenas[tensor.arena].name] || "") + tensor.name + index + layer;
}

const versions = new Map();
// The numbers of a tensor at a time, NaN where nobody has written yet.
function valuesAt(tensor, time) {
  const writes = writesOf[tensor.number];
  let last = writes.length - 1;
  while (last >= 0 && writes[last].launch > time) last--;
  const key = `${tensor.number} ${last}`;
  if (!versions.has(key)) {
    const source = tensor.kind === "f" ? floats : ints;
    const start = page.initial[tensor.number];
    const values = start === null ? new Float64Array(tensor.words).fill(NaN)
                                  : Float64Array.from(source.subarray(start, start + tensor.words));
    for (const {low, high, at} of writes.slice(0, last + 1)) {
      values.set(source.subarray(at, at + high - low), low);
    }
    versions.set(key, values);
  }
  return versions.get(key);
}

function numberAt(arena, word, time) {
  const tensor = tensorAt(arena, word);
  return tensor ? valuesAt(tensor, time)[word - tensor.start] : NaN;
}

// The last launch, not behind a time, that wrote a word; -1 if none did.
function writerOf(tensor, index, time) {
  const writes = writesOf[tensor.number].filter(
    (write) => write.launch <= time && index >= write.low && index < write.high);
  return writes.length ? writes[writes.length - 1].launch : -1;
}

// The launches behind a time that read a tensor, until another writes this number of it again.
function readersOf(tensor, index, time) {
  const next = writesOf[tensor.number].find(
    (write) => write.launch > time && index >= write.low && index < write.high);
  const end = next ? next.launch : launches.length;
  return readsOf[tensor.number].filter((i) => i > time && i <= end);
}

const STAYS = new Set(["parameters", "adam m", "adam v", "update", "batch"]);
// Will anybody still read what a tensor has at a time? Then its memory is in use.
function isAlive(tensor, time) {
  if (STAYS.has(arenas[tensor.arena].name)) return true;
  const writes = writesOf[tensor.number].filter((write) => write.launch <= time);
  return writes.slice(-2).some(  // two: q of dqkv comes before its k and v
    (write) => write.launch === time || readersOf(tensor, write.low, time - 1).length);
}

// ---- Arguments of a launch: {name, value}, or {name, arena, start, shape, strides, read, written}

function argumentOf(launch, name) {
  return launch.arguments.find((argument) => argument.name === name);
}
function isArray(argument) {
  return argument.arena !== undefined;
}
function countOf(shape) {
  return shape.reduce((product, size) => product * size, 1);
}
// The argument of a launch that has a word, and is written by it if `written`.
function argumentAt(launch, arena, word, written) {
  const found = launch.arguments.filter((argument) => argument.arena === arena &&
    word >= argument.start && word <= argument.shape.reduce(
      (last, size, i) => last + (size - 1) * argument.strides[i], argument.start));
  return found.find((argument) => !written || argument.written) || found[0];
}
function fullName(launch) {
  return {matmul: "matrix product", zero: "zeros", put: "copy from the host"}[launch.name] ||
         launch.name;
}

// ---- Traces: requests, each of the lanes of one warp

const KINDS = ["load", "store", "atomic", "copy", "barrier of the block", "barrier of the warp"];
const BARRIER = 4;  // the first kind that is none of a request
const decoded = new Map();

// [{line, block, .. at: the word of each lane, or null}] of a trace's number.
async function requestsOf(number) {
  if (!decoded.has(number)) {
    const packed = new Blob([bytesOf(page.traces[number].data)]).stream();
    const text = new Response(packed.pipeThrough(new DecompressionStream("deflate")));
    decoded.set(number, (await text.json()).map(
      ([line, block, warp, kind, space, bytes, cost, least, at]) =>
        ({line, block, warp, kind, space, bytes, cost, least, at})));
  }
  return decoded.get(number);
}

// [{request, lane}]: which lanes of a launch touched a word, by requests of these kinds.
async function touchesOf(launch, arena, word, kinds) {
  if (launch.trace === undefined) return [];
  const found = [];
  for (const request of await requestsOf(launch.trace)) {
    const argument = request.kind < BARRIER && launch.arguments[request.space];
    if (!argument || argument.arena !== arena || !kinds.includes(KINDS[request.kind])) continue;
    request.at.forEach((at, lane) => {
      const from = argument.start + at;
      if (at !== null && word >= from && word < from + request.bytes / 4) {
        found.push({request, lane});
      }
    });
  }
  return found;
}
