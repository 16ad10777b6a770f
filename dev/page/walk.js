// Parts 1 and 2: the walk over all launches, and the microscope.
"use strict";

// An element: h("button", {onclick: f}, "text", another element).
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const $ = (id) => document.getElementById(id);
$("theme").addEventListener("click", () => {
  const root = document.documentElement.dataset;
  root.theme = root.theme === "dark" ? "light" : "dark";
});

const state = {
  launch: 0,
  lit: null,  // the number of a tensor
  chosen: null,  // {arena, word, time}: the number under the microscope
  trail: [],  // those before it
  windows: new Map(),  // {"launch argument": {row, column}}: the part of a table that is shown
};

// ---- The strip of launches

const PHASES = [["update_pass", "update"], ["backward_pass", "backward"], ["loss_pass", "loss"],
                ["forward_pass", "forward"]];
function phaseOf(launch) {
  const names = launch.stack.map(([name]) => name);
  const phase = PHASES.find(([name]) => names.includes(name));
  return phase ? phase[1] : "start";
}
const SHORT = {matmul: "×", zero: "0", put: "↓"};
function shortName(launch) {
  return SHORT[launch.name] || launch.name.split("_").map((word) => word[0]).join("");
}
function fullName(launch) {
  return {matmul: "matrix product", zero: "zeros", put: "copy from the host"}[launch.name] ||
         launch.name;
}

// A headline; a kernel's name stays as it is.
function titleOf(launch) {
  const name = fullName(launch);
  return launch.trace === undefined ? name[0].toUpperCase() + name.slice(1) : name;
}

function drawStrip() {
  const strip = $("strip");
  strip.replaceChildren(...launches.map((launch, i) => h("button", {
    type: "button", class: phaseOf(launch), "data-launch": i, title: fullName(launch),
    onclick: () => goTo(i)}, shortName(launch))),
  h("div", {class: "legend"}, ...["forward", "loss", "backward", "update"].map((phase) => h("span", {},
    h("i", {style: `background:var(--${phase})`}), phase)),
  h("span", {}, "× a matrix product; letters: a kernel")));
}
function markStrip() {
  for (const button of $("strip").querySelectorAll("button")) {
    const i = Number(button.dataset.launch), launch = launches[i];
    const now = i === state.launch;
    button.setAttribute("aria-current", now);
    button.tabIndex = now ? 0 : -1;
    const lit = state.lit === null ? [] : [
      ...(launch.writes.some(([number]) => number === state.lit) ? ["writes"] : []),
      ...(launch.reads.includes(state.lit) ? ["reads"] : [])];
    button.classList.toggle("lit", lit.length > 0);
    button.setAttribute("aria-label", `${shortName(launch)}: launch ${i + 1}, ${fullName(launch)}` +
      (lit.length ? `, ${lit.join(" and ")} ${nameOf(tensors[state.lit])}` : ""));
  }
}

// ---- The source

const functionNames = Object.keys(page.functions).sort(
  (a, b) => page.functions[a].first - page.functions[b].first);
// {"function line": [launches]}
const launchesOfLine = new Map();
launches.forEach((launch, i) => {
  for (const [name, line] of launch.stack) {
    const key = `${name} ${line}`;
    if (!launchesOfLine.has(key)) launchesOfLine.set(key, []);
    launchesOfLine.get(key).push(i);
  }
});

const functionCards = new Map();  // {name: its element}
function drawCode() {
  for (const name of functionNames) {
    const {lines, first} = page.functions[name];
    let quotes = 0;
    const indent = lines[0].match(/^ */)[0].length;
    const elements = lines.map((line, k) => {
      const text = line.slice(indent) || " ";
      const inDoc = quotes === 1;
      quotes += (line.match(/"""/g) || []).length;
      const doc = inDoc || (quotes > 0 && line.includes('"""')) ||
                  line.trimStart().startsWith("#");
      const own = launchesOfLine.get(`${name} ${k}`);
      if (!own) return h("span", {class: doc ? "doc" : null}, text);
      return h("button", {type: "button", "data-line": `${name} ${k}`, onclick: () => {
        goTo(own.find((i) => i > state.launch) ?? own[0]);
      }}, text, h("small", {}, own.length > 1 ? `${own.length} launches` : "1 launch"));
    });
    functionCards.set(name, h("details", {class: "function", "data-name": name},
      h("summary", {}, `${name}  `, h("small", {class: "none"}, `line ${first}`)),
      h("div", {class: "lines"}, ...elements)));
  }
}
const OPEN = 3;  // functions of a call that are open, from the innermost
function markCode() {
  const stack = launches[state.launch].stack, names = stack.map(([name]) => name);
  const open = new Set(names.slice(-OPEN));
  for (const [name, details] of functionCards) {
    details.classList.toggle("on", names.includes(name));
    details.open = open.has(name);
    for (const line of details.querySelectorAll(".now")) line.classList.remove("now");
  }
  for (const [name, line] of stack) {
    const button = functionCards.get(name).querySelector(`[data-line="${name} ${line}"]`);
    button.classList.add("now");
  }
  const others = functionNames.filter((name) => !names.includes(name));
  const wasOpen = $("code").querySelector("#others")?.open;
  $("code").replaceChildren(h("h3", {style: "margin-top:0"}, "Who calls it, from the loop inwards"),
    ...names.map((name) => functionCards.get(name)),
    h("details", {id: "others", open: wasOpen}, h("summary", {}, "All other functions of the step"),
      ...others.map((name) => functionCards.get(name))));
}

// ---- A launch

// A text in which shapes such as (N,3C) have numbers.
function withSizes(text, launch) {
  const known = {...sizes};
  for (const {name, value} of launch.arguments) if (value !== null) known[name] = value;
  return text.replace(/\(([A-Za-z0-9*,. ]+)\)/g, (whole, inside) => {
    const parts = inside.split(",").map((part) => {
      const factors = part.trim().match(/^(\d*)\*?([A-Za-z]+)$/) || part.trim().match(/^(\d+)()$/);
      if (!factors) return null;
      if (!factors[2]) return factors[1];
      return known[factors[2]] === undefined ? null : (factors[1] || 1) * known[factors[2]];
    });
    return parts.includes(null) ? whole : `(${parts.join(",")})`;
  });
}

// The docstring of the method that launches it.
function docOf(launch) {
  const names = launch.stack.map(([name]) => name).filter((name) => !name.startsWith("launch_") &&
    name !== "gelu_of_product");
  const text = page.functions[names[names.length - 1]].lines.join("\n");
  const doc = (text.match(/"""(.*?)"""/s) || ["", ""])[1];
  return doc.split("\n").map((line) => line.replace(/^ {8}/, "")).join("\n");
}

function formulaOf(launch) {
  if (launch.name === "matmul") {
    const accumulates = argumentOf(launch, "accumulate").value;
    const bias = isArray(argumentOf(launch, "bias")) ? " + bias (J)" : "";
    const [I, J] = argumentOf(launch, "out").shape, K = argumentOf(launch, "left").shape[1];
    const letters = `out (I,J) ${accumulates ? "+=" : "="} left (I,K) @ right (K,J)${bias}`;
    const numbers = {I, J, K};
    return [letters, letters.replace(/\b[IJK]\b/g, (letter) => numbers[letter]),
            `${(2 * I * J * K).toLocaleString("en")} FLOPs`];
  }
  if (launch.name === "zero") return ["all bits 0", "", ""];
  if (launch.name === "put") return ["the host's numbers go to the device's memory", "", ""];
  const comment = page.kernels[launch.name].comment.join("\n");
  return [comment, withSizes(comment, launch), ""];
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

function formula(title, text) {
  return h("div", {}, h("div", {class: "none"}, h("small", {}, title)),
           h("pre", {class: "formula", tabindex: 0, role: "region", "aria-label": title || "the formula with sizes"}, text));
}

function drawLaunch() {
  const launch = launches[state.launch];
  const [letters, numbers, work] = formulaOf(launch);
  const arrays = launch.arguments.filter(isArray);
  const facts = launch.grid ? [
    `${countOf(launch.grid)} block${countOf(launch.grid) > 1 ? "s" : ""}` +
      (launch.grid[1] > 1 ? ` (${launch.grid.join(" × ")})` : ""),
    `${launch.block[0]} threads each`, launch.shared ? `${launch.shared} bytes of shared memory` : "",
    ...launch.arguments.filter((a) => a.value !== null).map((a) => `${a.name} = ${shown(a.value)}`)]
    : [work];
  const cards = (title, test, time) => {
    const chosen = arrays.filter((argument) => test(launch, argument));
    return chosen.length ? [h("h3", {}, title), h("div", {class: "tensors"},
      ...chosen.map((argument) => tensorCard(launch, argument, time)))] : [];
  };
  $("launch").replaceChildren(h("div", {class: "card"},
    h("h3", {style: "margin-top:0"}, titleOf(launch)),
    formula("the method that asks for it", docOf(launch)),
    formula(launch.grid ? "the comment over the kernel" : "the formula", letters),
    numbers && numbers !== letters ? h("details", {open: launch.name === "matmul"},
      h("summary", {}, "with these sizes"), formula("", numbers)) : null,
    h("div", {class: "facts"}, ...facts.filter(Boolean).map((fact) => h("span", {}, fact)))),
  ...cards("Writes", isOutput, state.launch), ...cards("Reads", isInput, state.launch - 1));
}

// ---- A tensor's numbers

function viewOf(argument) {
  const shape = argument.shape, last = shape.length - 1;
  const columns = last < 0 ? 1 : shape[last];
  return {columns, rows: countOf(shape) / Math.max(1, columns), at(row, column) {
    let word = argument.start + column * (argument.strides[last] || 1), rest = row;
    for (let i = last - 1; i >= 0; i--) {
      word += rest % shape[i] * argument.strides[i];
      rest = Math.floor(rest / shape[i]);
    }
    return word;
  }};
}

// An argument that is a whole arena is shown tensor by tensor.
function partsOf(argument) {
  const count = countOf(argument.shape);
  return tensorsOf[argument.arena].filter(
    (t) => t.start < argument.start + count && t.start + t.words > argument.start);
}

function tensorCard(launch, argument, time) {
  const parts = partsOf(argument), key = `${launches.indexOf(launch)} ${argument.name} ${time}`;
  const wanted = parts.find((t) => t.number === state.lit) || (state.chosen &&
    parts.find((t) => t === tensorAt(state.chosen.arena, state.chosen.word))) || parts[0];
  let tensor = parts.length > 1 ? wanted : tensorAt(argument.arena, argument.start);
  const card = h("div", {class: "card tensor"});
  const redraw = () => {
    const whole = {start: tensor.start, shape: tensor.shape, arena: tensor.arena,
                   strides: tensor.shape.map((_, i) => countOf(tensor.shape.slice(i + 1)))};
    const own = parts.length > 1 ? whole : argument;
    const view = viewOf(own);
    const lit = state.lit === tensor.number;
    card.classList.toggle("lit", lit);
    const select = parts.length > 1 ? h("select", {"aria-label": `tensor of ${argument.name}`,
      onchange: (event) => {
        tensor = parts[event.target.value];
        state.windows.delete(key);
        redraw();
      }}, ...parts.map((t, i) => h("option", {value: i, selected: t === tensor}, nameOf(t)))) : null;
    card.replaceChildren(
      h("h4", {}, argument.name, h("span", {}, `${nameOf(tensor)} (${own.shape.join(",")})`),
        h("button", {type: "button", class: "star", "aria-pressed": lit, onclick: () =>
          light(tensor.number)}, lit ? "★ lit" : "☆ light", h("span", {class: "hidden"},
          ` ${nameOf(tensor)}`))),
      select ? h("div", {class: "tools"}, select) : "",
      ...numberTable(view, own, tensor, time, key));
  };
  redraw();
  return card;
}

const ROWS = 8, CELL = 58, CARD = 330;  // a cell's width in pixels, and the least of a card
function numberTable(view, own, tensor, time, key) {
  const whole = $("launch").clientWidth, cards = Math.max(1, Math.floor((whole + 13) / (CARD + 13)));
  const most = Math.max(4, Math.min(12, Math.floor((whole / cards - 80) / CELL)));
  const rows = Math.min(ROWS, view.rows), columns = Math.min(most, view.columns);
  const window_ = state.windows.get(key) || {row: 0, column: 0};
  const chosen = state.chosen;
  if (!state.windows.has(key) && chosen && tensorAt(chosen.arena, chosen.word) === tensor) {
    for (let r = 0; r < view.rows; r++) {
      for (let c = 0; c < view.columns; c++) {
        if (view.at(r, c) === chosen.word) Object.assign(window_, {row: r, column: c});
      }
    }
  }
  window_.row = Math.max(0, Math.min(view.rows - rows, window_.row));
  window_.column = Math.max(0, Math.min(view.columns - columns, window_.column));
  state.windows.set(key, window_);
  const values = valuesAt(tensor, time);
  let largest = 0;
  for (const x of values) if (Math.abs(x) > largest) largest = Math.abs(x);
  const value = (r, c) => values[view.at(r, c) - tensor.start];

  const table = h("table", {class: "numbers", role: "grid", "aria-label":
    `${nameOf(tensor)}, rows ${window_.row} to ${window_.row + rows - 1}`});
  const box = h("div", {});
  const fill = (focus) => {
    const {row, column} = window_;
    table.replaceChildren(h("thead", {}, h("tr", {}, h("th", {scope: "col"},
      h("span", {class: "none"}, "row")),
    ...[...Array(columns).keys()].map((c) => h("th", {scope: "col"}, `${column + c}`)))),
    h("tbody", {}, ...[...Array(rows).keys()].map((r) => h("tr", {},
      h("th", {scope: "row"}, `${row + r}`),
      ...[...Array(columns).keys()].map((c) => {
        const x = value(row + r, column + c), word = view.at(row + r, column + c);
        const selected = chosen && chosen.word === word && chosen.arena === own.arena &&
          (chosen.time === time);
        return h("td", {tabindex: selected || (!chosen && !r && !c) || (!r && !c) ? 0 : -1,
          "aria-selected": Boolean(selected), "data-place": `${r} ${c}`,
          "data-word": word, "data-arena": own.arena, "data-time": time,
          "data-known": !Number.isNaN(x),
          style: Number.isNaN(x) ? null : `--side:var(--${x < 0 ? "low" : "high"});` +
            `--x:${Math.round(Math.min(1, Math.abs(x) / (largest || 1)) * 62)}%`,
          onclick: () => choose({arena: own.arena, word, time}),
          onkeydown: (event) => keyIn(event, r, c)}, shown(x, 3));
      })))));
    table.setAttribute("aria-label",
      `${nameOf(tensor)}, rows ${row} to ${row + rows - 1}, columns ${column} to ${column + columns - 1}`);
    if (focus) table.querySelector(`[data-place="${focus}"]`).focus();
  };
  const move = (down, right, focus) => {
    window_.row = Math.max(0, Math.min(view.rows - rows, window_.row + down));
    window_.column = Math.max(0, Math.min(view.columns - columns, window_.column + right));
    fill(focus);
  };
  const keyIn = (event, r, c) => {
    const steps = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1]};
    if (event.key === "Enter" || event.key === " ") event.target.click();
    else if (!steps[event.key]) return;
    else {
      const [down, right] = steps[event.key];
      const to = [r + down, c + right];
      if (to[0] >= 0 && to[0] < rows && to[1] >= 0 && to[1] < columns) {
        table.querySelector(`[data-place="${to.join(" ")}"]`).focus();
      } else move(down, right, `${r} ${c}`);
    }
    event.preventDefault();
  };
  fill();
  if (view.rows <= rows && view.columns <= columns) return [table];
  const buttons = [["↑", -rows, 0, "rows before"], ["↓", rows, 0, "next rows"],
                   ["←", 0, -columns, "columns before"], ["→", 0, columns, "next columns"]]
    .filter(([, down]) => down ? view.rows > rows : view.columns > columns)
    .map(([text, down, right, label]) => h("button", {type: "button",
      "aria-label": `${text} ${label} of ${nameOf(tensor)}`, onclick: () => move(down, right)}, text));
  box.append(h("div", {class: "tools"}, ...buttons));
  const picture = view.rows > 1 ? heatmap(view, value, largest, (r, c) => {
    Object.assign(window_, {row: r - (rows >> 1), column: c - (columns >> 1)});
    move(0, 0);
  }) : null;
  return picture ? [picture, table, box] : [table, box];
}

// A picture of a whole tensor, a pixel for each number.
function heatmap(view, value, largest, onclick) {
  const tall = Math.min(view.rows, 256), wide = Math.min(view.columns, 256);
  const canvas = h("canvas", {width: wide, height: tall, "aria-hidden": "true",
    style: `height:${Math.max(24, Math.min(90, tall * 2))}px`});
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(name).trim().match(/\w\w/g).map((x) => parseInt(x, 16));
  const [low, high, cell] = ["--low", "--high", "--cell"].map(rgb);
  const context = canvas.getContext("2d"), image = context.createImageData(wide, tall);
  for (let r = 0; r < tall; r++) {
    for (let c = 0; c < wide; c++) {
      const x = value(Math.floor(r * view.rows / tall), Math.floor(c * view.columns / wide));
      const share = Math.min(1, Math.abs(x) / (largest || 1)) || 0, side = x < 0 ? low : high;
      for (let i = 0; i < 3; i++) {
        image.data[4 * (r * wide + c) + i] = cell[i] + (side[i] - cell[i]) * Math.sqrt(share);
      }
      image.data[4 * (r * wide + c) + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  canvas.addEventListener("click", (event) => onclick(
    Math.floor(event.offsetY / canvas.clientHeight * view.rows),
    Math.floor(event.offsetX / canvas.clientWidth * view.columns)));
  return canvas;
}

// ---- What the reader does

function goTo(i, keep = false) {
  if (i < 0 || i >= launches.length) return;
  state.launch = i;
  if (!keep) state.windows.clear();
  $("where").textContent = `launch ${i + 1} of ${launches.length}: ${fullName(launches[i])}, ` +
    launches[i].stack.map(([name]) => name).slice(2).join(" › ");
  markStrip();
  markCode();
  drawLaunch();
  drawPlay();
  for (const draw of onLaunch) draw();
}
const onLaunch = [];  // what other parts draw when the walk goes on

// Go to the next launch, or the one before, that reads or writes the tensor that is lit.
function goToLit(step) {
  for (let i = state.launch + step; launches[i]; i += step) {
    const {reads, writes} = launches[i];
    if (reads.includes(state.lit) || writes.some(([number]) => number === state.lit)) {
      return goTo(i);
    }
  }
}

function light(number) {
  state.lit = state.lit === number ? null : number;
  markStrip();
  drawLaunch();
}

// Put a number under the microscope.
function choose(place, follow = false) {
  if (follow && state.chosen) state.trail.push(state.chosen);
  if (!follow) state.trail = [];
  state.chosen = place;
  if (!follow) {
    for (const cell of document.querySelectorAll(".numbers td")) {
      const {word, arena, time} = cell.dataset;
      cell.setAttribute("aria-selected", Number(word) === place.word &&
        Number(arena) === place.arena && Number(time) === place.time);
    }
  }
  return drawStory();
}

// ---- The microscope: how a number came about

let telling = 0;  // only the newest story is drawn
async function drawStory() {
  const mine = ++telling, place = state.chosen;
  if (!place) {
    $("story").replaceChildren(h("p", {class: "card none"}, "No number is chosen yet."));
    return;
  }
  const tensor = tensorAt(place.arena, place.word), story = storyOf(place.arena, place.word, place.time);
  const found = numberAt(place.arena, place.word, place.time);
  const name = placeOfWord(tensor, place.word);
  const trail = state.trail.map((each, k) => h("button", {type: "button", onclick: () => {
    state.trail = state.trail.slice(0, k);
    state.chosen = each;
    drawStory();
  }}, `${placeOfWord(tensorAt(each.arena, each.word), each.word)} ←`));
  const after = story ? story.number : -1;
  const readers = readersOf(tensor, place.word - tensor.start, Math.max(place.time, after));
  const stores = story ? await touchesOf(story.launch, place.arena, place.word, ["store", "atomic"]) : [];
  const loads = readers.length
    ? await touchesOf(launches[readers[0]], place.arena, place.word, ["load", "copy", "atomic"]) : [];
  if (mine !== telling) return;
  const card = h("div", {class: "card"});
  card.append(trail.length ? h("div", {class: "trail"}, ...trail) : "",
    h("h3", {style: "margin-top:0", "data-value": found, "data-worked": story ? story.value : found},
      `${name} = ${shown(found)}`));
  if (!story) {
    const why = arenas[tensor.arena].name === "parameters" ? "a parameter, as earlier steps left it"
      : STAYS.has(arenas[tensor.arena].name) ? "there before the step began" : "not written yet";
    card.append(h("p", {}, `It is ${why}.`));
  } else {
    card.append(h("p", {}, `${story.formula}:`), h("div", {class: "tale formula", tabindex: 0,
      role: "region", "aria-label": "the formula in numbers"},
      ...story.parts.map((part) => typeof part === "string" ? part : h("button", {type: "button",
        class: "operand", title: part.label, onclick: () => choose(part.ref, true)}, shown(part.value))),
      ` = ${shown(story.value)}`));
    const store = stores[stores.length - 1];
    card.append(h("p", {}, "Launch ", h("button", {type: "button", class: "operand",
      onclick: () => goTo(story.number)}, `${story.number + 1}`), ` (${fullName(story.launch)}) ` +
      (store ? `stored it in ${whoOf(store)}.` : story.launch.name === "matmul"
        ? "stored it: a BLAS library multiplies." : "stored it.")));
    if (store) card.append(sourceOf(story.launch, store.request.line));
  }
  if (!Number.isNaN(found)) card.append(h("p", {},
    readers.length ? "Read next by " : "Nobody reads it again in this step.",
    ...readers.slice(0, 6).flatMap((i) => [h("button", {type: "button", class: "operand",
      onclick: () => goTo(i)}, `${i + 1} ${fullName(launches[i])}`), " "]),
    loads.length ? `: first in ${whoOf(loads[0])}` +
      (loads.length > 1 ? `, and ${loads.length - 1} more times.` : ".") : ""));
  $("story").replaceChildren(card);
  $("chosen").replaceChildren(h("strong", {}, `${name} = ${shown(found)}`),
    story ? ` ${story.formula} ` : " ", h("a", {href: "#microscope"}, "to the microscope"));
  $("chosen").hidden = false;
}
function whoOf({request, lane}) {
  return `line ${request.line}, block ${request.block}, warp ${request.warp}, lane ${lane}`;
}

// Some lines of kernels.cu around one.
function sourceOf(launch, line, around = 3) {
  const rows = [];
  for (let k = Math.max(1, line - around); k <= Math.min(page.source.length, line + around); k++) {
    rows.push(h("span", {class: k === line ? "now" : null},
                `${String(k).padStart(5)}  ${page.source[k - 1]}`));
  }
  return h("div", {class: "lines card", tabindex: 0, role: "region",
                   "aria-label": `line ${line} of ${page.sourceName || "kernels.cu"}`}, ...rows);
}

// ---- The microscope: a launch plays

const play = {at: 0, timer: null, requests: [], speed: 4};
async function drawPlay() {
  stop();
  const launch = launches[state.launch];
  $("play-title").textContent = `${titleOf(launch)}, request by request`;
  if (launch.trace === undefined) {
    $("play").replaceChildren(h("p", {class: "card none"}, launch.name === "matmul"
      ? "A BLAS library multiplies the matrices: its threads are not ours to watch. Go to a kernel."
      : "The host does this itself."));
    return;
  }
  const requests = await requestsOf(launch.trace);
  if (launches[state.launch] !== launch) return;
  play.requests = requests;
  play.at = 0;
  const slider = h("input", {type: "range", min: 0, max: requests.length - 1, value: 0,
    "aria-label": "request", oninput: (event) => show(Number(event.target.value))});
  const button = h("button", {type: "button", onclick: () => play.timer ? stop() : start()}, "play");
  const speed = h("select", {"aria-label": "speed", onchange: (event) => {
    play.speed = Number(event.target.value);
    if (play.timer) start();
  }}, ...[[1, "slow"], [4, "medium"], [30, "fast"]].map(([x, name]) =>
    h("option", {value: x, selected: x === play.speed}, name)));
  const scene = h("div", {class: "players"});
  play.draw = () => {
    slider.value = play.at;
    slider.setAttribute("aria-valuetext", `request ${play.at + 1} of ${requests.length}`);
    button.textContent = play.timer ? "pause" : "play";
    scene.replaceChildren(...sceneOf(launch, requests, play.at));
  };
  $("play").replaceChildren(h("div", {class: "bar"},
    h("button", {type: "button", onclick: () => show(play.at - 1)}, "step back"), button,
    h("button", {type: "button", onclick: () => show(play.at + 1)}, "step"), speed,
    h("div", {class: "range"}, slider)), h("div", {class: "card"}, scene),
    summaryOf(launch, requests));
  play.draw();
}
function show(at) {
  play.at = Math.max(0, Math.min(play.requests.length - 1, at));
  play.draw();
}
function start() {
  clearInterval(play.timer);
  play.timer = setInterval(() => {
    if (play.at >= play.requests.length - 1) stop();
    else show(play.at + 1);
  }, 1000 / play.speed);
  play.draw();
}
function stop() {
  clearInterval(play.timer);
  play.timer = null;
  if (play.draw && play.requests.length) play.draw();
}

const DONE = {load: "loads", store: "stores", atomic: "changes atomically", copy: "copies"};
function sceneOf(launch, requests, at) {
  const request = requests[at], blocks = countOf(launch.grid);
  const warps = Math.ceil(launch.block[0] / 32), processors = page.loops.multiprocessors;
  const chips = (count, now) => [...Array(Math.min(count, 64)).keys()].map(
    (i) => h("span", {class: `chip ${i === now ? "on" : i < now ? "past" : ""}`}, `${i}`));
  const machine = h("div", {class: "machine"},
    ...[...Array(Math.min(processors, blocks)).keys()].map((p) => h("div", {},
      `multiprocessor ${p}: blocks `, ...[...Array(blocks).keys()].filter((b) =>
        b % processors === p && Math.abs(b - request.block) < 8 * processors).map((b) => h("span", {
        class: `chip ${b === request.block ? "on" : b < request.block ? "past" : ""}`}, `${b}`)))));
  const inBlock = h("div", {}, `warps of block ${request.block}: `, ...chips(warps, request.warp));
  const head = h("p", {style: "margin:0"});
  if (request.kind >= BARRIER) {
    head.append(h("strong", {}, request.kind === BARRIER
      ? `Barrier: all warps of block ${request.block} wait for each other`
      : `The lanes of warp ${request.warp} meet: they exchange numbers, or wait`));
    return [machine, inBlock, h("div", {class: "barrier"}, head), sourceOf(launch, request.line)];
  }
  const argument = launch.arguments[request.space];
  const shared = request.space < 0;
  const array = shared ? page.traces[launch.trace].spaces[-1 - request.space] : argument.name;
  const active = request.at.filter((x) => x !== null).length;
  head.append(h("strong", {}, `Warp ${request.warp} of block ${request.block} ` +
    `${DONE[KINDS[request.kind]]} ${array}: `),
    `${active} lanes, ${request.bytes} bytes each. ` + (shared
      ? `Shared memory, ${request.cost} turn${request.cost > 1 ? "s" : ""}` +
        (request.cost > request.least ? ` (${request.least} without bank conflicts).` : ".")
      : `Moved: ${request.cost} sectors, ${32 * request.cost} bytes; ` +
        `wanted: ${wantedBytes(request)} bytes.`));
  const lanes = h("div", {class: "lanes"}, ...request.at.map((word, lane) => h("div",
    {class: word === null ? "off" : null}, h("b", {}, `${lane} `),
    word === null ? "–" : laneText(launch, request, argument, array, word))));
  return [machine, inBlock, head, h("div", {class: "pair"}, h("div", {}, lanes),
    h("div", {}, memoryOf(request, shared, argument), sourceOf(launch, request.line)))];
}
function wantedBytes(request) {
  const words = new Set();
  for (const word of request.at) {
    for (let i = 0; word !== null && i < request.bytes / 4; i++) words.add(word + i);
  }
  return 4 * words.size;
}
function laneText(launch, request, argument, array, word) {
  const to = request.bytes > 4 ? `..${word + request.bytes / 4 - 1}` : "";
  if (request.space < 0) return `[${word}${to}]`;
  const time = state.launch - (request.kind === KINDS.indexOf("store") ? 0 : 1);
  const x = numberAt(argument.arena, argument.start + word, time);
  return `[${word}${to}] ${shown(x)}${request.bytes > 4 ? " …" : ""}`;
}

// The sectors of a request, or its banks: who wants which 4 bytes.
function memoryOf(request, shared) {
  const wanted = new Map();
  request.at.forEach((word, lane) => {
    for (let i = 0; word !== null && i < request.bytes / 4; i++) {
      const to = word + i;
      wanted.set(to, [...(wanted.get(to) || []), lane]);
    }
  });
  const rowsOf = [...new Set([...wanted.keys()].map((word) => Math.floor(word / 8)))].sort((a, b) => a - b);
  const most = 16;
  const rows = rowsOf.slice(0, most).map((row) => h("tr", {},
    h("th", {scope: "row"}, `[${8 * row}]`),
    ...[...Array(8).keys()].map((i) => {
      const lanes = wanted.get(8 * row + i) || [];
      return h("td", {class: lanes.length ? "wanted" : null},
        lanes.length > 1 ? `${lanes[0]}+` : lanes.length ? `${lanes[0]}` : "·");
    })));
  return h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "sectors"},
    h("table", {class: "memory"}, h("caption", {class: "none"}, shared
      ? "Words of shared memory, and the lane that wants each"
      : "A row is a sector of 32 bytes; blue: wanted, by this lane; grey: moved for nothing"),
    h("tbody", {}, ...rows)),
    rowsOf.length > most ? h("p", {class: "none"}, `… and ${rowsOf.length - most} more`) : "");
}

// What each line moves, in all.
function summaryOf(launch, requests) {
  const lines = new Map();
  let barriers = 0;
  for (const r of requests) {
    if (r.kind >= BARRIER) {
      barriers += r.kind === BARRIER;
      continue;
    }
    const key = `${r.line} ${r.kind} ${r.space < 0}`;
    const sum = lines.get(key) || {line: r.line, kind: KINDS[r.kind], shared: r.space < 0,
                                   requests: 0, cost: 0, least: 0};
    sum.requests++;
    sum.cost += r.cost;
    sum.least += r.least;
    lines.set(key, sum);
  }
  const rows = [...lines.values()].sort((a, b) => a.line - b.line).map((s) => h("tr", {},
    h("td", {}, h("code", {}, `${s.line}  ${page.source[s.line - 1]?.trim().slice(0, 60) ?? ""}`)),
    h("td", {}, s.kind), h("td", {}, s.shared ? "turns" : "sectors"), h("td", {}, `${s.requests}`),
    h("td", {class: s.cost > s.least ? "wasted" : null}, `${s.cost}` +
      (s.cost > s.least ? ` (${s.cost - s.least} wasted)` : "")), h("td", {}, `${s.least}`)));
  return h("details", {}, h("summary", {}, `What each line moves; ${barriers} barriers of blocks`),
    h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "what each line moves"},
      h("table", {class: "plain"},
        h("thead", {}, h("tr", {}, ...["line", "kind", "unit", "requests", "cost", "least"].map(
          (title) => h("th", {scope: "col"}, title)))), h("tbody", {}, ...rows))));
}
