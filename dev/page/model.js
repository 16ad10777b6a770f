// Parts 3, 4 and 5: the gradient, memory and time, and other models.
"use strict";

const NS = "http://www.w3.org/2000/svg";
function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function tableOf(caption, titles, rows) {
  return h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption},
    h("table", {class: "plain"}, h("caption", {class: "none"}, caption),
      h("thead", {}, h("tr", {}, ...titles.map((title) => h("th", {scope: "col"}, title)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", {}, cell)))))));
}

// ---- 3: the gradient

const found = page.differences.map((row) => {
  const of = (arena) => tensors.find((t) => arenas[t.arena].name === arena &&
                                            t.name === row.name && t.layer === row.layer);
  const [parameter, gradient] = [of("parameters"), of("gradients")];
  const written = writerOf(gradient, row.index, launches.length);
  return {...row, parameter, gradient, written, word: parameter.start + row.index,
          backward: valuesAt(gradient, launches.length)[row.index],
          quotients: row.losses.map(([h_, above, below]) => (above - below) / (2 * h_))};
});

function drawDifferences() {
  const names = [...new Set(found.map((row) => nameOf(row.parameter)))];
  const tensor = h("select", {id: "of-tensor", onchange: () => fill()},
                   ...names.map((name) => h("option", {}, name)));
  const index = h("select", {id: "of-index", onchange: () => draw()});
  const result = h("div", {});
  const own = () => found.filter((row) => nameOf(row.parameter) === tensor.value);
  const fill = () => {
    index.replaceChildren(...own().map((row, i) => h("option", {value: i},
      placeOfWord(row.parameter, row.word))));
    draw();
  };
  const draw = () => result.replaceChildren(...differenceOf(own()[index.value || 0]));
  $("differences").replaceChildren(h("div", {class: "form"},
    h("label", {for: "of-tensor"}, "parameter of", tensor),
    h("label", {for: "of-index"}, "which one", index)), h("div", {class: "pair"}, result, scatter()));
  tensor.value = names.find((name) => name.startsWith("qkvw")) || names[0];
  fill();
}

function differenceOf(row) {
  const name = placeOfWord(row.parameter, row.word);
  const update = launches.findIndex((launch) => launch.name === "adamw");
  const story = new Story(update);
  const a = adamwOf(story, row.word - argumentOf(launches[update], "params").start);
  const after = numberAt(row.parameter.arena, row.word, update);
  const digits = (x) => x.toPrecision(6);
  return [h("div", {class: "card"}, h("h3", {style: "margin-top:0"}, name),
    h("p", {}, "The backward pass: ", h("button", {type: "button", class: "operand",
      onclick: () => {
        choose({arena: row.gradient.arena, word: row.gradient.start + row.index,
                time: launches.length - 1});
        $("microscope").scrollIntoView();
      }}, digits(row.backward)), " (follow it in the microscope)"),
    tableOf(`Losses with ${name} changed by h`,
      ["h", "loss(w+h)", "loss(w−h)", "difference / 2h", "off by"],
      row.losses.map(([h_, above, below], i) => [digits(h_), above.toFixed(8), below.toFixed(8),
        digits(row.quotients[i]), (row.quotients[i] - row.backward).toExponential(1)])),
    h("p", {class: "hint"}, "From a large h to a smaller one the error falls with h²; with a very " +
      "small one it grows again, since the losses are rounded to fp32.")),
  h("div", {class: "card", style: "margin-top:1rem"}, h("h3", {style: "margin-top:0"}, "AdamW's update of it"),
    tableOf("AdamW in numbers", ["what", "number"], [
      ["gradient g", digits(a.g / a.scale)],
      [`scaled to the norm ${shown(a.clip)} (by ${shown(a.scale)})`, digits(a.g)],
      [`m = m + ${shown(a.rate1)} (g − m)`, digits(a.m)],
      [`v = v + ${shown(a.rate2)} (g² − v)`, digits(a.v)],
      ["m, corrected for its start at 0", digits(a.m * a.correction1)],
      ["v, corrected", digits(a.v * a.correction2)],
      ["change: m / (sqrt(v) + eps)", digits(a.change)],
      ["weight decay · w", digits(a.decay * a.before)],
      ["w before", digits(a.before)],
      [`w − ${shown(a.learning_rate)} · (change + decay)`, digits(a.p)],
      ["w, as the step left it", digits(after)]]))];
}

// Each of the parameters: its gradient along x, the difference along y, on a scale of roots.
function scatter() {
  const size = 360, root = (x) => Math.sign(x) * Math.sqrt(Math.abs(x));
  const values = found.map((row) => [row.backward, row.quotients[row.quotients.length - 1]]);
  const most = Math.max(...values.flat().map((x) => Math.abs(root(x)))) * 1.05;
  const at = (x) => size / 2 * (1 + root(x) / most);
  return h("div", {class: "card"}, svg("svg", {viewBox: `-10 -10 ${size + 20} ${size + 40}`, role: "img",
    "aria-label": `${found.length} parameters: gradient and difference are the same within ` +
      `${Math.max(...values.map(([x, y]) => Math.abs(x - y))).toExponential(1)}`,
    style: "max-width:32rem;margin:auto"},
  svg("line", {x1: 0, y1: size, x2: size, y2: 0, stroke: "var(--line)", "stroke-width": 2}),
  ...values.map(([x, y]) => svg("circle", {cx: at(x), cy: size - at(y), r: 3.2,
    fill: "var(--accent)", "fill-opacity": 0.55})),
  svg("text", {x: size, y: size + 22, "text-anchor": "end", class: "soft"}, "backward pass →"),
  svg("text", {x: 0, y: 8, class: "soft"}, "↑ difference")),
  h("p", {class: "none"}, `${found.length} parameters, on scales of square roots. On the line both agree.`));
}

// ---- Maps whose areas are bytes

// A treemap (Bruls et al. 2000): [{item, x, y, width, height}] of items with a size, largest first.
function treemap(items, x, y, width, height) {
  const out = [];
  let rest = [...items].filter((item) => item.size > 0).sort((a, b) => b.size - a.size);
  while (rest.length) {
    const side = Math.min(width, height);
    const unit = width * height / rest.reduce((sum, item) => sum + item.size, 0);
    let count = 0, sum = 0, best = Infinity;
    for (let i = 0; i < rest.length; i++) {
      const grown = sum + rest[i].size, depth = unit * grown / side;
      const ratio = depth * depth / (unit * rest[i].size);
      const worst = Math.max(ratio, 1 / ratio);
      if (worst > best) break;
      [best, count, sum] = [worst, i + 1, grown];
    }
    const depth = unit * sum / side;
    let along = 0;
    for (const item of rest.slice(0, count)) {
      const length = side * item.size / sum;
      out.push(width >= height ? {item, x, y: y + along, width: depth, height: length}
                               : {item, x: x + along, y, width: length, height: depth});
      along += length;
    }
    if (width >= height) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
    rest = rest.slice(count);
  }
  return out;
}

function sizeText(bytes) {
  const units = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const unit = units.find(([size]) => bytes >= size);
  return unit ? `${(bytes / unit[0]).toPrecision(3)} ${unit[1]}` : `${bytes} bytes`;
}

// groups: [{name, items: [{name, size, fill}]}], each an own area with a title.
function mapOf(groups, label) {
  const width = Math.max(320, Math.min(1100, ($("map").clientWidth || 800))), height = width < 600 ? 420 : 340;
  const whole = groups.map((group) => ({...group, size: group.items.reduce((sum, i) => sum + i.size, 0)}));
  const parts = [];
  for (const area of treemap(whole, 0, 0, width, height)) {
    const head = area.height > 40 ? 16 : 0;
    parts.push(svg("rect", {x: area.x, y: area.y, width: area.width, height: area.height,
                            fill: "none", stroke: "var(--ink)", "stroke-width": 1}));
    if (head && area.width > 60) {
      parts.push(svg("text", {x: area.x + 4, y: area.y + 12, "font-weight": 600, "font-size": 11},
                     `${area.item.name} ${sizeText(area.item.size)}`.slice(0, Math.floor(area.width / 7.2))));
    }
    for (const box of treemap(area.item.items, area.x, area.y + head, area.width, area.height - head)) {
      const text = box.width > 6.5 * box.item.name.length && box.height > 13;
      parts.push(svg("rect", {x: box.x + 0.5, y: box.y + 0.5, width: Math.max(0, box.width - 1),
        height: Math.max(0, box.height - 1), fill: box.item.fill, rx: 2},
      svg("title", {}, `${box.item.name}: ${sizeText(box.item.size)}`)),
      ...(text ? [svg("text", {x: box.x + 4, y: box.y + 12, "font-size": 11}, box.item.name)] : []));
    }
  }
  return svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label}, ...parts);
}

function drawMap() {
  const time = state.launch, launch = launches[time];
  const written = new Set(launch.writes.map(([number]) => number));
  const read = new Set(launch.reads);
  let alive = 0, total = 0;
  const fillOf = (tensor) => {
    const lives = isAlive(tensor, time);
    total += 4 * tensor.words;
    alive += lives ? 4 * tensor.words : 0;
    return written.has(tensor.number) ? "var(--high)" : read.has(tensor.number) ? "var(--reading)"
      : lives ? "var(--alive)" : "var(--dead)";
  };
  const groups = arenas.map((arena, a) => ({name: arena.name, items: tensorsOf[a].map((tensor) => ({
    name: tensor.layer === null ? tensor.name : `${tensor.name} ${tensor.layer}`,
    size: 4 * tensor.words, fill: fillOf(tensor)}))}));
  const label = `launch ${time + 1}: ${sizeText(alive)} of ${sizeText(total)} will still be read`;
  $("map").replaceChildren(h("h3", {}, "The tiny model's memory as the walk goes"),
    h("div", {class: "bar"}, h("button", {type: "button", onclick: () => goTo(state.launch - 1)}, "previous launch"),
      h("button", {type: "button", onclick: () => goTo(state.launch + 1)}, "next launch"),
      h("div", {class: "range"}, h("input", {type: "range", min: 0, max: launches.length - 1, value: time,
        "aria-label": "launch", onchange: (event) => goTo(Number(event.target.value))}))),
    h("p", {}, `Behind ${label}.`), mapOf(groups, label),
    h("div", {class: "legend"}, ...[["high", "written now"], ["reading", "read now"], ["alive", "will be read"],
      ["dead", "nobody reads it again"]].map(([name, text]) =>
      h("span", {}, h("i", {style: `background:var(--${name})`}), text))));
}

// ---- The measured step

function drawTimeline() {
  const {title, gpu, commit, step, rate, copy, rows, day} = page.models.measured;
  const sum = rows.reduce((total, row) => total + row.ms, 0);
  const bars = rows.map((row) => h("div", {
    style: `flex:${row.ms};--least:${Math.min(100, Math.round(100 * row.share))}%`,
    title: `${row.name}: ${row.ms} ms, ${Math.round(100 * row.share)}% of the ceiling`}, row.name));
  const bound = (row) => row.unit === "GB" ? (row.share > 0.5 ? "memory" : "latency") : "arithmetic";
  $("timeline").replaceChildren(
    h("h3", {}, `A measured step: ${title}`),
    h("p", {}, `${gpu}, ${day}, commit ${commit} (dev/RESULTS.md). As one graph the step takes ${step} ms. ` +
      "The bars are its kernels, side by side, widths to scale. Dark is the least that the hardware " +
      `allows: bytes at the rate of a copy (${copy / 1e12} TB/s), FLOPs at that of a large product ` +
      `(${rate / 1e12} TFLOP/s).`),
    h("div", {class: "timeline", role: "img", "aria-label": "the kernels of a step, by time: as in the table below"},
      ...bars),
    h("h3", {}, "Its roofline"), roofline(),
    tableOf("Kernels of the measured step, slowest first",
      ["kernel", "launches", "ms", "share of the step", "of its ceiling", "bound by"],
      rows.map((row) => [row.name, row.launches, row.ms, `${(100 * row.ms / sum).toFixed(1)}%`,
                         `${Math.round(100 * row.share)}%`, bound(row)])));
}

// At the left the kernels that move bytes, each with its rate; at the right products, by the FLOPs
// for each byte of their matrices, in bf16. (Attention's bytes are not in the table.)
function roofline() {
  const {rate, copy, rows} = page.models.measured;
  const width = 900, height = 300, middle = 330, bottom = 250, top = 24, right = width - 16;
  const perSecond = (row) => row.work / (row.ms / row.launches / 1000);
  const circle = (row, x, y) => svg("circle", {cx: x, cy: y, r: 3 + 2.2 * Math.sqrt(row.ms),
    fill: `var(--${row.unit === "GB" ? "high" : "accent"})`, "fill-opacity": 0.65},
  svg("title", {}, `${row.name}: ${(perSecond(row) / 1e12).toPrecision(3)} ` +
                   `${row.unit === "GB" ? "TB/s" : "TFLOP/s"}, ${row.ms} ms`));
  const bytes = rows.filter((row) => row.unit === "GB" && row.share >= 0.01);
  const upTo = (value, most) => bottom - (bottom - top) * value / most;
  const products = rows.map((row) => ({row, shape: row.name.match(/(\d+) x (\d+) x (\d+)/)}))
    .filter(({shape}) => shape).map(({row, shape}) => {
      const [M, N, K] = shape.slice(1).map(Number);
      return {row, x: row.work / (2 * (M * K + K * N + M * N))};
    });
  const px = (x) => middle + 60 + (right - middle - 60) * Math.log10(x / 50) / Math.log10(40);
  const most = 1.1 * rate, ridge = rate / copy;
  return svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", style: "max-width:70rem",
    "aria-label": `kernels that move bytes reach up to ${copy / 1e12} TB/s, products ${rate / 1e12} TFLOP/s`},
  svg("line", {x1: 10, x2: middle - 20, y1: upTo(copy, 1.1 * copy), y2: upTo(copy, 1.1 * copy),
               stroke: "var(--ink)", "stroke-width": 2}),
  svg("text", {x: 10, y: top - 4}, `a copy, ${copy / 1e12} TB/s`),
  ...bytes.map((row, i) => circle(row, 24 + (middle - 60) * i / bytes.length,
                                  upTo(perSecond(row), 1.1 * copy))),
  svg("text", {x: 10, y: bottom + 22, class: "soft"}, "kernels that move bytes, the slowest first"),
  svg("line", {x1: 10, x2: middle - 20, y1: bottom, y2: bottom, stroke: "var(--line)"}),
  svg("polyline", {points: `${px(50)},${upTo(50 * copy, most)} ${px(ridge)},${upTo(rate, most)} ` +
    `${right},${upTo(rate, most)}`, fill: "none", stroke: "var(--ink)", "stroke-width": 2}),
  svg("line", {x1: middle + 60, x2: right, y1: bottom, y2: bottom, stroke: "var(--line)"}),
  svg("text", {x: right, y: top - 4, "text-anchor": "end"}, `a large product, ${rate / 1e12} TFLOP/s`),
  ...[100, 250, 500, 1000, 2000].map((x) => svg("text", {x: px(x), y: bottom + 16, "text-anchor": "middle",
                                                        class: "soft"}, `${x}`)),
  svg("text", {x: right, y: bottom + 36, "text-anchor": "end", class: "soft"},
      "products, by FLOPs for each byte of their matrices"),
  ...products.map(({row, x}) => circle(row, px(x), upTo(perSecond(row), most))));
}

// ---- 5: other models

function valueOf(tree, letters) {
  if (typeof tree === "string") return letters[tree];
  if (!Array.isArray(tree)) return tree;
  const [sign, ...parts] = tree;
  const [one, other] = parts.map((part) => valueOf(part, letters));
  return {"+": () => one + other, "-": () => one - other, "*": () => one * other,
          "//": () => Math.floor(one / other), max: () => Math.max(one, other),
          min: () => Math.min(one, other)}[sign]();
}

// The sizes, memory, FLOPs and time of a model: {L, NH, HS, V, B, T, dtype, recompute, moments, gpu}.
function modelOf(asked) {
  const {formulas, gpus, measured, share} = page.models;
  const C = asked.NH * asked.HS;
  const letters = {...asked, C, maxT: Math.max(asked.T, page.models.maxT),
                   Vp: Math.ceil(asked.V / page.models.padding) * page.models.padding};
  const real = asked.dtype === "bf16" ? "bf16" : "fp32";
  const tables = formulas.tables[`${real} ${asked.recompute} ${asked.moments}`];
  const memory = Object.entries(tables).map(([name, {total, tensors: of}]) => ({
    name, bytes: valueOf(total, letters),
    tensors: Object.entries(of).map(([tensor, tree]) => ({name: tensor, size: valueOf(tree, letters)}))}));
  const flops = valueOf(formulas.flops, letters) +
                (Number(asked.recompute) === 2 ? valueOf(formulas.again, letters) : 0);
  const h100 = gpus.find((gpu) => gpu.name === "H100"), gpu = gpus.find((each) => each.name === asked.gpu);
  const rate = gpu.flops[asked.dtype] && measured.rate * gpu.flops[asked.dtype] / h100.flops.bf16;
  const tokens = asked.B * asked.T;
  return {letters, memory, total: memory.reduce((sum, arena) => sum + arena.bytes, 0),
          parameters: valueOf(formulas.parameters, letters), flops, step: flops * tokens,
          seconds: rate ? flops * tokens / (rate * share) : null, tokens, gpu};
}

const SLIDERS = [["L", "layers L", [1, 2, 4, 6, 8, 12, 16, 24, 36, 48], 12],
  ["NH", "heads NH", [1, 2, 4, 6, 8, 12, 16, 20, 25, 32], 12],
  ["HS", "channels of a head HS", [32, 64, 96, 128], 64],
  ["V", "words V", [256, 1024, 8192, 32000, 50257, 100277], 50257],
  ["B", "sequences B", [1, 2, 4, 8, 16, 32, 64, 128], 32],
  ["T", "tokens T", [64, 128, 256, 512, 1024, 2048, 4096], 1024]];
const FILLS = ["--forward", "--update", "--loss", "--backward", "--alive"];

function drawOwn() {
  const asked = {dtype: "bf16", recompute: 0, moments: "fp32", gpu: "H100"};
  const result = h("div", {});
  const controls = SLIDERS.map(([name, title, values, first]) => {
    asked[name] = first;
    const output = h("output", {for: `own-${name}`}, `${first}`);
    return h("label", {for: `own-${name}`}, title, output, h("input", {type: "range", id: `own-${name}`, min: 0,
      max: values.length - 1, value: values.indexOf(first), "aria-valuetext": `${first}`, oninput: (event) => {
        asked[name] = values[event.target.value];
        output.textContent = asked[name];
        event.target.setAttribute("aria-valuetext", asked[name]);
        draw();
      }}));
  });
  const choices = [["dtype", "dtype", ["bf16", "tf32", "fp32"]], ["recompute", "--recompute", [0, 1, 2]],
    ["moments", "--moments", ["fp32", "bf16"]], ["gpu", "GPU", page.models.gpus.map((gpu) => gpu.name)]];
  const selects = choices.map(([name, title, values]) => h("label", {for: `own-${name}`}, title,
    h("select", {id: `own-${name}`, onchange: (event) => {
      asked[name] = event.target.value;
      draw();
    }}, ...values.map((value) => h("option", {selected: value === asked[name]}, `${value}`)))));
  const draw = () => {
    const model = modelOf(asked);
    const fits = model.total <= model.gpu.memory;
    const figures = [["parameters", model.parameters.toLocaleString("en")], ["C", model.letters.C],
      ["memory", sizeText(model.total)],
      [`${asked.gpu} has ${sizeText(model.gpu.memory)}`, fits ? "it fits" : "it does not fit"],
      ["FLOPs for a token", model.flops.toExponential(3)], ["FLOPs of a step", model.step.toExponential(3)],
      ["a step, about", model.seconds ? `${(1000 * model.seconds).toPrecision(3)} ms` : "unknown"],
      ["tokens a second", model.seconds ? Math.round(model.tokens / model.seconds).toLocaleString("en") : "unknown"]];
    const groups = model.memory.map((arena, i) => ({name: arena.name, items: arena.tensors.map(
      (tensor) => ({...tensor, fill: `var(${FILLS[i % FILLS.length]})`}))}));
    result.replaceChildren(h("div", {class: "big"}, ...figures.map(([name, value]) =>
      h("div", {}, h("b", {}, `${value}`), name))),
    mapOf(groups, `memory by tensor, ${sizeText(model.total)} in all`),
    tableOf("Memory by arena", ["arena", "bytes", "in words"], model.memory.map(
      (arena) => [arena.name, arena.bytes.toLocaleString("en"), sizeText(arena.bytes)])));
  };
  $("model").replaceChildren(h("div", {class: "form"}, ...controls, ...selects), result,
    h("p", {class: "hint"}, `The time is the FLOPs at ${page.models.share} of the rate of a large product, as ` +
      "--dry-run reckons. That rate is the H100's, measured in bf16; of others, a guess: it is scaled by " +
      "multiprocessors and FLOPs a clock. On a GPU, dev/ also keeps some MiB for sums of biases."));
  draw();
}
