// Parts 1 and 2: the walk over all launches, and the microscope.
"use strict";

const state = {
  launch: 0,
  lit: null,  // the number of a tensor
  chosen: null,  // {arena, word, time}: the number under the microscope
  trail: [],  // those before it
};
const onLaunch = [];  // what other parts draw when the walk goes on

// ---- The strip of launches

const PHASES = {update_pass: "update", backward_pass: "backward", loss_pass: "loss",
                forward_pass: "forward"};
function phaseOf(launch) {
  return PHASES[Object.keys(PHASES).find((name) => launch.stack.some(([own]) => own === name))];
}
function shortName(launch) {
  return {matmul: "×", zero: "0", put: "↓"}[launch.name] ||
         launch.name.split("_").map((word) => word[0]).join("");
}
function touches(launch, number) {
  return [launch.writes.some(([written]) => written === number) && "writes",
          launch.reads.includes(number) && "reads"].filter(Boolean).join(" and ");
}

function drawStrip() {
  $("strip").replaceChildren(...launches.map((launch, i) => {
    const lit = state.lit === null ? "" : touches(launch, state.lit), now = i === state.launch;
    return button(shortName(launch), () => goTo(i), {title: fullName(launch),
      class: `${phaseOf(launch)} ${lit && "lit"}`, tabindex: now ? 0 : -1,
      "aria-current": now ? "step" : "false",
      "aria-label": `${shortName(launch)}: launch ${i + 1}, ${fullName(launch)}` +
                    (lit && `, ${lit} ${nameOf(tensors[state.lit])}`)});
  }));
}

// ---- The source

const functions = Object.entries(page.functions || {}).sort(([, a], [, b]) => a.first - b.first);
const launchesOfLine = new Map();  // {"function line": [launches]}
launches.forEach((launch, i) => {
  for (const [name, line] of launch.stack) {
    const key = `${name} ${line}`;
    launchesOfLine.set(key, [...(launchesOfLine.get(key) || []), i]);
  }
});

const functionCards = new Map();  // {name: its element}
function drawCode() {
  for (const [name, {lines, first, in_doc: [from, to]}] of functions) {
    const indent = lines[0].match(/^ */)[0].length;
    const elements = lines.map((line, k) => {
      const text = line.slice(indent) || " ", own = launchesOfLine.get(`${name} ${k}`);
      const soft = k >= from && k < to || line.trimStart().startsWith("#");
      if (!own) return h("span", {class: soft && "soft"}, text);
      const go = () => goTo(own.find((i) => i > state.launch) ?? own[0]);
      return h("button", {type: "button", onclick: go, "data-line": `${name} ${k}`}, text,
        h("small", {}, own.length > 1 ? `${own.length} launches` : "1 launch"));
    });
    functionCards.set(name, h("details", {class: "function"},
      h("summary", {}, name, h("small", {class: "soft"}, ` line ${first}`)),
      h("div", {class: "lines"}, ...elements)));
  }
}
const OPEN = 2;  // functions of a call that are open, from the innermost
function markCode() {
  const names = launches[state.launch].stack.map(([name]) => name);
  for (const [name, details] of functionCards) {
    details.open = names.slice(-OPEN).includes(name);
    for (const line of details.querySelectorAll(".now")) line.classList.remove("now");
  }
  for (const [name, line] of launches[state.launch].stack) {
    functionCards.get(name).querySelector(`[data-line="${name} ${line}"]`).classList.add("now");
  }
  $("callers").replaceChildren(...names.map((name) => functionCards.get(name)));
  $("others").replaceChildren(...functions.filter(([name]) => !names.includes(name))
    .map(([name]) => functionCards.get(name)));
}

// ---- A launch

// A text in which shapes such as (N,3C) have numbers.
function withSizes(text, launch) {
  const known = {...sizes};
  for (const {name, value} of launch.arguments) if (value !== null) known[name] = value;
  return text.replace(/\(([A-Za-z0-9*,. ]+)\)/g, (whole, inside) => {
    const parts = inside.split(",").map((part) => {
      const [found, count, letter] = part.trim().match(/^(\d*)\*?([A-Za-z]*)$/) || [];
      return found && (count || 1) * (letter ? known[letter] : 1);
    });
    return parts.every((part) => part >= 0) ? `(${parts.join(",")})` : whole;
  });
}

// [the formula with letters, the same with sizes, the work]
function formulaOf(launch) {
  if (launch.name === "zero") return ["all bits 0", "", ""];
  if (launch.name === "put") return ["the host's numbers go to the device's memory", "", ""];
  if (launch.name !== "matmul") {
    const comment = page.kernels[launch.name].comment.join("\n");
    return [comment, withSizes(comment, launch), ""];
  }
  const sign = argumentOf(launch, "accumulate").value ? "+=" : "=";
  const bias = isArray(argumentOf(launch, "bias")) ? " + bias (J)" : "";
  const [I, J] = argumentOf(launch, "out").shape, K = argumentOf(launch, "left").shape[1];
  const letters = `out (I,J) ${sign} left (I,K) @ right (K,J)${bias}`, numbers = {I, J, K};
  return [letters, letters.replace(/\b[IJK]\b/g, (letter) => numbers[letter]),
          `${(2 * I * J * K).toLocaleString("en")} FLOPs`];
}

function drawLaunch() {
  const launch = launches[state.launch], [letters, numbers, work] = formulaOf(launch);
  const block = (title, text, open = true) => h("details", {open}, h("summary", {}, title),
    h("pre", {class: "formula", tabindex: 0, role: "region", "aria-label": title}, text));
  const caller = launch.stack.map(([name]) => name).reverse().find(
    (name) => !name.startsWith("launch_") && name !== "gelu_of_product");
  const facts = launch.grid ? [
    `${countOf(launch.grid)} block${countOf(launch.grid) > 1 ? "s" : ""} of ${launch.block[0]} threads`,
    launch.shared ? `${launch.shared} bytes of shared memory` : "",
    ...launch.arguments.filter(({value}) => value !== null).map(
      ({name, value}) => `${name} = ${shown(value)}`)] : [work];
  $("about").replaceChildren(h("h3", {}, fullName(launch)),
    h("p", {class: "soft"}, facts.filter(Boolean).join(", ")),
    block(`${caller}, which asks for it`, page.functions[caller].doc),
    block(launch.grid ? "The comment over the kernel" : "The formula", letters),
    numbers && numbers !== letters ? block("The same with these sizes", numbers, !launch.grid) : "");
  for (const [id, role, time] of [["writes", "written", state.launch],
                                  ["reads", "read", state.launch - 1]]) {
    $(id).replaceChildren(...launch.arguments.filter((argument) => argument[role]).map(
      (argument) => tensorCard(argument, time)));
  }
}

// ---- A tensor's numbers

// A table of an array: its last dimension is a row.
function viewOf({shape, start, strides}) {
  const last = shape.length - 1, columns = last < 0 ? 1 : shape[last];
  return {columns, rows: countOf(shape) / Math.max(1, columns), at(row, column) {
    let word = start + column * (strides[last] || 1), rest = row;
    for (let i = last - 1; i >= 0; i--) {
      word += rest % shape[i] * strides[i];
      rest = Math.floor(rest / shape[i]);
    }
    return word;
  }};
}

function placeOfWord(tensor, word) {
  const index = [];
  let rest = word - tensor.start;
  for (const size of [...tensor.shape].reverse()) {
    index.unshift(rest % size);
    rest = Math.floor(rest / size);
  }
  return nameOf(tensor, `[${index.join(",")}]`);
}

// An argument that is a whole arena is shown tensor by tensor.
function tensorCard(argument, time) {
  const end = argument.start + countOf(argument.shape);
  const parts = tensorsOf[argument.arena].filter(
    (t) => t.start < end && t.start + t.words > argument.start);
  const chosen = state.chosen && tensorAt(state.chosen.arena, state.chosen.word);
  const first = parts.find((t) => t.number === state.lit) || parts.find((t) => t === chosen) ||
                parts.find((t) => t.words < 2000) || parts[0];
  const card = h("article", {class: "card tensor"});
  const draw = (number) => {
    const tensor = parts.length > 1 ? tensors[number] : tensorAt(argument.arena, argument.start);
    const own = parts.length === 1 ? argument : {start: tensor.start, shape: tensor.shape,
      strides: tensor.shape.map((_, i) => countOf(tensor.shape.slice(i + 1)))};
    const lit = state.lit === tensor.number, name = nameOf(tensor);
    card.classList.toggle("lit", lit);
    card.replaceChildren(h("header", {}, h("h4", {}, argument.name),
      parts.length > 1 ? select(`tensor of ${argument.name}`, parts.map(
        (t) => [t.number, nameOf(t)]), tensor.number, (value) => draw(Number(value))) : name,
      h("span", {class: "soft"}, `(${own.shape.join(",")})`),
      button(lit ? "★" : "☆", () => light(tensor.number),
             {"aria-pressed": String(lit), "aria-label": `light ${name}`})),
      ...numbersOf(viewOf(own), tensor, time));
  };
  draw(first.number);
  return card;
}

// A picture of a whole tensor, a pixel for each number, and its table, which scrolls.
function numbersOf(view, tensor, time) {
  const values = valuesAt(tensor, time);
  const most = values.reduce((top, x) => Math.max(top, Math.abs(x) || 0), 0) || 1;
  const cell = (x) => `<td class="${x < 0 ? "low" : "high"}" style="--x:${
    Math.round(62 * Math.abs(x) / most) || 0}%">${shown(x, 3)}</td>`;
  const row = (r) => `<tr><th scope="row">${r}</th>${range(view.columns).map(
    (c) => cell(values[view.at(r, c) - tensor.start])).join("")}</tr>`;
  const table = h("table", {class: "numbers", role: "grid", "aria-label":
    `${nameOf(tensor)}, ${view.rows} rows, ${view.columns} columns`});
  table.innerHTML = `<thead><tr><th scope="col">row</th>${
    range(view.columns).map((c) => `<th scope="col">${c}</th>`).join("")}</tr></thead><tbody>${
    range(view.rows).map(row).join("")}</tbody>`;
  table.rows[1].cells[1].tabIndex = 0;
  table.placeOf = (cell) => ({arena: tensor.arena, time,
                              word: view.at(cell.parentNode.rowIndex - 1, cell.cellIndex - 1)});
  const scroll = h("div", {class: "scroll"}, table);
  return view.rows > 8 ? [picture(view, values, tensor, most, scroll), scroll] : [scroll];
}

// Click it to go to that part of the table.
function picture(view, values, tensor, most, scroll) {
  const canvas = h("canvas", {width: view.columns, height: view.rows, "aria-hidden": "true"});
  const context = canvas.getContext("2d");
  for (const row of range(view.rows)) {
    for (const column of range(view.columns)) {
      const x = values[view.at(row, column) - tensor.start];
      context.fillStyle = x < 0 ? "#4a90d9" : "#ef9a3c";
      context.globalAlpha = Math.sqrt(Math.abs(x) / most) || 0;
      context.fillRect(column, row, 1, 1);
    }
  }
  canvas.addEventListener("click", ({offsetX, offsetY}) => scroll.scrollTo(
    scroll.scrollWidth * offsetX / canvas.clientWidth - scroll.clientWidth / 2,
    scroll.scrollHeight * offsetY / canvas.clientHeight - scroll.clientHeight / 2));
  return canvas;
}

// ---- What the reader does

function goTo(i) {
  if (i < 0 || i >= launches.length) return;
  state.launch = i;
  $("where").textContent = `launch ${i + 1} of ${launches.length}: ${fullName(launches[i])}, ` +
    launches[i].stack.map(([name]) => name).slice(2).join(" › ");
  drawStrip();
  markCode();
  drawLaunch();
  $("play-title").textContent = `Launch ${i + 1}, ${fullName(launches[i])}, request by request`;
  drawPlay();
  for (const draw of onLaunch) draw();
}

// Go to the next launch, or the one before, that reads or writes the tensor that is lit.
function goToLit(step) {
  let i = state.launch + step;
  while (launches[i] && !touches(launches[i], state.lit)) i += step;
  goTo(i);
}

function light(number) {
  state.lit = state.lit === number ? null : number;
  drawStrip();
  drawLaunch();
}

// Put a number under the microscope.
function choose(place, follow = false) {
  state.trail = follow && state.chosen ? [...state.trail, state.chosen] : [];
  state.chosen = place;
  return drawStory();
}
function chooseCell(cell) {
  for (const each of document.querySelectorAll(".picked")) each.classList.remove("picked");
  cell.classList.add("picked");
  return choose(cell.closest("table").placeOf(cell));
}

// Arrows go from cell to cell of a table, Enter chooses.
function keyInTable(event) {
  const cell = event.target.closest(".numbers td");
  const step = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1]}[event.key];
  if (!cell || !step && event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  if (!step) return chooseCell(cell);
  const row = cell.closest("table").rows[cell.parentNode.rowIndex + step[0]];
  const next = row && row.cells[cell.cellIndex + step[1]];
  if (next && next.tagName === "TD") {
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

// ---- The microscope: how a number came about

function operand(text, onclick, title) {
  return button(text, onclick, {class: "operand", title});
}

let telling = 0;  // only the newest story is drawn
async function drawStory() {
  const mine = ++telling, {arena, word, time} = state.chosen;
  const tensor = tensorAt(arena, word), index = word - tensor.start;
  const story = storyOf(arena, word, time), found = numberAt(arena, word, time);
  const name = placeOfWord(tensor, word), title = `${name} = ${shown(found)}`;
  const readers = readersOf(tensor, index, story ? story.number : -1);
  const stores = story ? await touchesOf(story.launch, arena, word, ["store", "atomic"]) : [];
  const loads = readers.length
    ? await touchesOf(launches[readers[0]], arena, word, ["load", "copy", "atomic"]) : [];
  if (mine !== telling) return;
  const trail = state.trail.map((each, k) => button(
    `← back to ${placeOfWord(tensorAt(each.arena, each.word), each.word)}`, () => {
      state.trail = state.trail.slice(0, k);
      state.chosen = each;
      drawStory();
    }));
  const kept = STAYS.has(arenas[tensor.arena].name);
  const told = story ? [h("p", {}, `${story.formula}:`), toldOf(story), ...whoStored(story, stores[stores.length - 1])]
    : [h("p", {}, kept ? "It is as earlier steps left it, or the host." : "Not written yet.")];
  const next = h("p", {}, readers.length ? "Read by " : "Nobody reads it in this step.",
    ...readers.slice(0, 6).flatMap(
      (i) => [operand(`${i + 1} ${fullName(launches[i])}`, () => goTo(i)), " "]),
    loads.length ? `: first in ${whoOf(loads[0])}` : "",
    loads.length > 1 ? `, and ${loads.length - 1} more times.` : "");
  $("story").replaceChildren(h("p", {class: "bar"}, ...trail),
    h("h3", {"data-worked": story ? story.value : found, "data-value": found}, title), ...told, next);
  $("chosen").replaceChildren(h("strong", {}, title), story ? ` ${story.formula} ` : " ",
    h("a", {href: "#microscope"}, "to the microscope"));
}
// A formula in numbers; its operands lead to their own stories.
function toldOf(story) {
  const told = (part) => part.ref ? operand(shown(part.value), () => choose(part.ref, true), part.label)
    : part.more ? button(part.text, ({target}) => target.replaceWith(...part.more.map(told)))
    : part.value === undefined ? part : shown(part.value);
  return h("p", {class: "formula tale"}, ...story.parts.map(told), ` = ${shown(story.value, 6)}`);
}
function whoOf({request, lane}) {
  return `line ${request.line}, block ${request.block}, warp ${request.warp}, lane ${lane}`;
}
function whoStored({number, launch}, store) {
  const launchLink = operand(`launch ${number + 1}`, () => goTo(number));
  const who = store ? ` in ${whoOf(store)}.`
    : launch.name === "matmul" ? " by a BLAS library's product." : ".";
  return [h("p", {}, "Stored by ", launchLink, ` (${fullName(launch)})${who}`),
          store ? sourceOf(store.request.line) : ""];
}

// Some lines of the kernels' source around one.
function sourceOf(line, around = 3) {
  const first = Math.max(1, line - around), last = Math.min(page.source.length, line + around);
  return h("div", {class: "lines", tabindex: 0, role: "region",
                   "aria-label": `line ${line} of ${page.sourceName}`},
    ...range(last - first + 1).map((k) => h("span", {class: first + k === line && "now"},
      `${String(first + k).padStart(5)}  ${page.source[first + k - 1]}`)));
}
