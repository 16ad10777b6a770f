// Parts 3, 4 and 5: the gradient, memory and time, and other models.
"use strict";

// ---- 3: the gradient

const believed = page.differences.map((row) => {
  const of = (arena) => tensors.find((t) => arenas[t.arena].name === arena &&
                                            t.name === row.name && t.layer === row.layer);
  const parameter = of("parameters"), gradient = of("gradients"), word = parameter.start + row.index;
  return {...row, parameter, gradient, word, place: placeOfWord(parameter, word),
          backward: valuesAt(gradient, launches.length)[row.index],
          quotients: row.losses.map(([step, above, below]) => (above - below) / (2 * step))};
});
const digits = (x) => x.toPrecision(6);

function drawDifferences() {
  const first = Math.max(0, believed.findIndex((row) => row.name === "qkvw"));
  $("which").replaceChildren(select("parameter", believed.map((row, i) => [i, row.place]), first,
                                    (i) => drawDifference(believed[i])));
  drawDifference(believed[first]);
  drawScatter();
}

function drawDifference({place, backward, gradient, index, losses, quotients, word}) {
  const follow = operand(digits(backward), () => {
    choose({arena: gradient.arena, word: gradient.start + index, time: launches.length - 1});
    $("microscope").scrollIntoView();
  }, "follow it in the microscope");
  const update = launches.findIndex((launch) => launch.name === "adamw");
  const offset = word - argumentOf(launches[update], "params").start;
  const rows = ["m", "v", "params"].map((name) => {
    const {arena, start} = argumentOf(launches[update], name);
    const story = storyOf(arena, start + offset, update);
    return [h("h4", {}, placeOfWord(tensorAt(arena, start + offset), start + offset)),
            h("p", {class: "soft"}, story.formula), toldOf(story)];
  });
  $("difference").replaceChildren(h("h3", {}, place),
    h("p", {}, "The backward pass: ", follow, " (follow it in the microscope)"),
    tableOf(`Losses with ${place} changed by h`,
      ["h", "loss(w+h)", "loss(w−h)", "difference / 2h", "off by"],
      losses.map(([step, above, below], i) => [digits(step), above.toFixed(8), below.toFixed(8),
        digits(quotients[i]),
        backward ? `${(100 * (quotients[i] / backward - 1)).toPrecision(2)}%` : "–"])),
    h("p", {class: "soft"}, "Two errors meet here. The formula's falls with h². That of the losses, " +
      "which fp32 rounds to some 7 digits, grows as h gets smaller, and is the larger one where the " +
      "gradient is small."),
    h("h3", {}, "AdamW's update of it"), ...rows.flat());
}

// Each of the parameters: its gradient along x, the difference along y, on a scale of roots.
function drawScatter() {
  const root = (x) => Math.sign(x) * Math.sqrt(Math.abs(x));
  const pairs = believed.map((row) => [row.backward, row.quotients[row.quotients.length - 1]]);
  const most = 1.05 * Math.max(...pairs.flat().map((x) => Math.abs(root(x))));
  const off = Math.max(...pairs.map(([x, y]) => Math.abs(x - y))).toExponential(1);
  const text = `${pairs.length} parameters, the gradient to the right and the difference upwards, ` +
    `on scales of square roots. On the line both agree: they differ by at most ${off}.`;
  $("scatter").replaceChildren(h("svg", {viewBox: "-1.1 -1.1 2.2 2.2", role: "img", "aria-label": text},
    h("line", {x1: -1, y1: 1, x2: 1, y2: -1}),
    ...pairs.map(([x, y]) => h("circle", {cx: root(x) / most, cy: -root(y) / most, r: 0.02}))),
  h("p", {class: "soft"}, text));
}

// ---- 4: maps whose areas are bytes

function sizeText(bytes) {
  const [size, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [0, "bytes"]].find(
    ([least]) => bytes >= least);
  return `${size ? (bytes / size).toPrecision(3) : bytes} ${unit}`;
}

const total = (list, of) => list.reduce((sum, each) => sum + of(each), 0);

// arenas: [{name, items: [{name, size, fill}]}], columns; each tensor a part of its column.
function mapOf(label, groups) {
  const columns = groups.map(({name, items}) => {
    const size = total(items, (item) => item.size);
    const boxes = [...items].sort((a, b) => b.size - a.size).map((item) => h("div", {
      style: `flex-grow:${item.size / size};background:var(--${item.fill})`,
      title: `${item.name} of ${name}: ${sizeText(item.size)}`}, h("span", {}, item.name)));
    return size ? h("div", {style: `flex-grow:${size}`}, h("b", {}, h("span", {},
      `${name} ${sizeText(size)}`)), ...boxes) : "";
  });
  return scrolling(label, h("div", {class: "map", role: "img", "aria-label": label}, ...columns));
}

function drawMap() {
  const launch = launches[state.launch], live = (t) => isAlive(t, state.launch);
  const fill = (t) => launch.writes.some(([number]) => number === t.number) ? "high"
    : launch.reads.includes(t.number) ? "reading" : live(t) ? "alive" : "dead";
  const bytes = (list) => sizeText(total(list, (t) => 4 * t.words));
  const label = `After launch ${state.launch + 1}: ${bytes(tensors.filter(live))} of ` +
                `${bytes(tensors)} will be read, in this step or the next`;
  $("map-launch").value = state.launch;
  $("map").replaceChildren(h("p", {}, label), mapOf(label, arenas.map(({name}, a) =>
    ({name, items: tensorsOf[a].map((t) => ({size: 4 * t.words, fill: fill(t),
      name: t.layer === null ? t.name : `${t.name} ${t.layer}`}))}))));
}

// ---- Other models, by the trainer's formulas

const {formulas, gpus, measured} = page.models;
const H100 = gpus.find((gpu) => gpu.name === "H100");

function valueOf(text, letters) {
  return Function("{maxT, V, L, NH, C, Vp, B, T, G}", `return ${text}`)(letters);
}

// Its sizes, memory, FLOPs and time. asked: {L, NH, HS, V, B, T, dtype, recompute, moments,
// optimizer, G (GPUs, with --zero 1 if there are several), gpu}.
function modelOf(asked) {
  const C = asked.NH * asked.HS, pad = page.models.padding, dtype = asked.dtype;
  const letters = {...asked, C, maxT: Math.max(asked.T, page.models.maxT),
                   Vp: Math.ceil(asked.V / pad) * pad};
  const of = (text) => valueOf(text, letters);
  const table = formulas.tables[[dtype === "tf32" ? "fp32" : dtype, asked.recompute, asked.moments,
                                 asked.optimizer, asked.G > 1 ? 1 : 0].join(" ")];
  if (typeof table === "string") return {refused: table};
  if (asked.optimizer === "muon" && asked.L % asked.G) {
    return {refused: "Muon with --zero 1: here the GPUs must divide the layers"};
  }
  const memory = table.map((i) => formulas.arenas[i]).map(([name, bytes, parts]) => ({
    name, bytes: of(bytes),
    items: Object.entries(parts).map(([tensor, text]) => ({name: tensor, size: of(text)}))}));
  const flops = of(formulas.flops) + (Number(asked.recompute) === 2 ? of(formulas.again) : 0);
  const update = asked.optimizer === "muon" ? of(formulas.muon) / asked.G : 0;
  const gpu = gpus.find((each) => each.name === asked.gpu);
  const speed = gpu.flops[dtype === "fp8" ? "bf16" : dtype];  // as --dry-run reckons
  const rate = speed && measured.rate * speed / H100.flops.bf16 * page.models.share;
  const step = flops * asked.B * asked.T + update;
  return {letters, memory, total: total(memory, (arena) => arena.bytes), gpu, flops, step,
          parameters: of(formulas.parameters), seconds: rate ? step / rate : null};
}

const FILLS = ["forward", "update", "loss", "backward", "alive"];
function drawMemory(id, name, model) {
  const label = `Memory of ${name} by tensor, ${sizeText(model.total)} in all`;
  const fill = (i) => FILLS[i % FILLS.length];
  $(id).replaceChildren(mapOf(label, model.memory.map((arena, i) => ({name: arena.name,
    items: arena.items.map((item) => ({...item, fill: fill(i)}))}))),
  legend(...model.memory.map((arena, i) => [fill(i), `${arena.name} ${sizeText(arena.bytes)}`])));
}

// A form of [name, title, values]: numbers get a slider, words a choice. draw() at each change of
// asked, which has the first values.
function formOf(id, controls, asked, draw) {
  const change = (name, value) => {
    asked[name] = value;
    draw();
  };
  $(id).replaceChildren(...controls.map(([name, title, values]) => {
    if (typeof values[0] === "string") {
      return h("label", {}, title, select(title, values.map((x) => [x, x]), asked[name],
                                          (value) => change(name, value)));
    }
    const output = h("output", {}, `${asked[name]}`);
    return h("label", {}, title, output, h("input", {type: "range", min: 0, max: values.length - 1,
      value: values.indexOf(asked[name]), "aria-label": title, "aria-valuetext": `${asked[name]}`,
      oninput: ({target}) => {
        output.textContent = values[target.value];
        target.setAttribute("aria-valuetext", values[target.value]);
        change(name, values[target.value]);
      }}));
  }));
  draw();
}
const OF_STEP = [["B", "sequences B", [1, 2, 4, 8, 16, 32, 64, 128]],
  ["T", "tokens T", [64, 128, 256, 512, 1024, 2048, 4096]],
  ["dtype", "--dtype", ["bf16", "fp8", "tf32", "fp32"]],
  ["recompute", "--recompute", ["0", "1", "2"]]];
const OF_MODEL = [["L", "layers L", [1, 2, 4, 6, 8, 12, 16, 24, 36, 48]],
  ["NH", "heads NH", [1, 2, 4, 6, 8, 12, 16, 20, 25, 32]],
  ["HS", "channels of a head HS", [32, 64, 96, 128]],
  ["V", "words V", [256, 1024, 8192, 32000, 50257, 100277]],
  ["G", "GPUs, with --zero 1", [1, 2, 4, 8]],
  ["moments", "--moments", ["fp32", "bf16"]], ["optimizer", "--optimizer", ["adamw", "muon"]],
  ["gpu", "GPU", gpus.map((gpu) => gpu.name)]];
const FIRST = {...measured.sizes, dtype: "bf16", recompute: "0", moments: "fp32",
               optimizer: "adamw", G: 1, gpu: "H100"};

// ---- 4: the measured step

// Its kernels at other choices: products and attention by FLOPs and the GPU's peak in that dtype,
// others by bytes. What --recompute 1 does again moves 24 bytes for each channel and token in bf16.
function rowsAt({B, T, dtype, recompute}) {
  const N = B * T / measured.sizes.B / measured.sizes.T;
  const factors = {N, "N*T": N * T / measured.sizes.T, 1: 1}, wide = /fp32|tf32/.test(dtype);
  const rows = measured.rows.map((row) => {
    const products = dtype === "fp8" && !row.fp8 ? 1 : H100.flops.bf16 / H100.flops[dtype];
    const bytes = wide && row.grows !== "1" ? 2 : 1;
    return {...row, ms: row.ms * factors[row.grows] * (row.unit === "GB" ? bytes : products) *
                        (recompute === "2" ? 1 + row.again : 1)};
  });
  const {L, NH, HS} = measured.sizes, moved = (wide ? 48 : 24) * B * T * L * NH * HS;
  return recompute !== "1" ? rows : [...rows, {name: "norms and GELU again", unit: "GB", share: 1,
                                               launches: 3 * L, ms: 1e3 * moved / measured.copy}];
}

function drawMeasured() {
  const {title, gpu, commit, step, rate, copy, day} = measured, asked = {...FIRST};
  $("measured-title").textContent = `A measured step: ${title}`;
  $("measured").textContent = `${gpu}, ${day}, commit ${commit} (dev/RESULTS.md). As one graph the ` +
    `step takes ${step} ms. Bars are its kernels, widths to scale. The fuller part of one is the ` +
    `least that the hardware allows: bytes at the rate of a copy (${copy / 1e12} TB/s), FLOPs at that of a large ` +
    `product (${rate / 1e12} TFLOP/s). Other choices are reckoned from these times: products by ` +
    "FLOPs and the GPU's peak, the rest by bytes.";
  const bound = (row) => row.unit !== "GB" ? "arithmetic" : row.share > 0.5 ? "memory" : "latency";
  formOf("step-form", OF_STEP, asked, () => {
    const rows = rowsAt(asked), sum = total(rows, (row) => row.ms), model = modelOf(asked);
    const before = total(measured.rows, (row) => row.ms);
    $("step-time").textContent = `${(step * sum / before).toPrecision(3)} ms a step, and ` +
      `${sizeText(model.total)} of memory`;
    $("timeline").replaceChildren(...rows.map((row) => h("div", {
      style: `flex-grow:${row.ms};--least:${Math.min(100, Math.round(100 * row.share))}%`,
      title: `${row.name}: ${shown(row.ms, 3)} ms`}, row.name)));
    drawMemory("step-map", "this step", model);
    $("kernels").replaceChildren(tableOf("Kernels of this step",
      ["kernel", "launches", "ms", "share of the step", "of its ceiling", "bound by"],
      rows.map((row) => [row.name, `${row.launches}`, shown(row.ms, 3),
        `${(100 * row.ms / sum).toFixed(1)}%`, `${Math.round(100 * row.share)}%`, bound(row)])));
  });
  drawRoofline();
}

// At the right products and attention, by FLOPs for each byte of their arrays; at the left kernels
// that move bytes. Upwards: the share of the large product's rate, or of the copy's.
function drawRoofline() {
  const {rate, copy, rows} = measured, least = 100, left = 360, right = 900, bottom = 280;
  const x = (intensity) => left + (right - left) * Math.log10(intensity / least) / Math.log10(20);
  const y = (share) => bottom - 220 * share, ridge = rate / copy;
  const text = (at, up, words, anchor) => h("text", {x: at, y: up, "text-anchor": anchor}, words);
  const moving = rows.filter((row) => row.unit === "GB" && row.share >= 0.01);
  const dots = rows.filter((row) => row.share >= 0.01).map((row) => {
    const kind = row.unit === "GB" ? "moves"
      : row.name.startsWith("attention") ? "attends" : "multiplies";
    const each = row.work / (row.ms / row.launches / 1e3) / 1e12, moves = kind === "moves";
    return h("circle", {class: kind, cy: y(each * 1e12 / (moves ? copy : rate)),
      cx: moves ? 20 + 24 * moving.indexOf(row) : x(row.work / row.bytes), r: 3 + 2.2 * Math.sqrt(row.ms)},
    h("title", {}, `${row.name}: ${each.toPrecision(3)} ${moves ? "TB/s" : "TFLOP/s"}, ${row.ms} ms`));
  });
  $("roofline").replaceChildren(scrolling("roofline", h("svg", {viewBox: `0 0 ${right} 330`, role: "img",
    "aria-label": "the roofline of the measured step: as in the table of its kernels"},
  h("polyline", {points: `0,${y(1)} 320,${y(1)}`}),
  h("polyline", {points: `${left},${y(least / ridge)} ${x(ridge)},${y(1)} ${right},${y(1)}`}),
  ...[[0, 320], [left, right]].map(([x1, x2]) => h("line", {x1, x2, y1: bottom, y2: bottom})),
  text(0, y(1) - 22, `the rate of a copy, ${copy / 1e12} TB/s`),
  text(right, y(1) - 22, `the rate of a large product, ${rate / 1e12} TFLOP/s`, "end"),
  text(0, bottom + 36, "kernels that move bytes, the slowest first"),
  text(right, bottom + 36, "FLOPs for each byte of the arrays", "end"),
  ...[100, 200, 500, 1000].map((each) => text(x(each), bottom + 16, `${each}`, "middle")), ...dots)),
  legend(["accent", "products"], ["reading", "attention"], ["high", "kernels that move bytes"]));
}

// ---- 5: your own model

function drawOwn() {
  const asked = {...FIRST};
  formOf("own-form", [...OF_MODEL.slice(0, 4), ...OF_STEP, ...OF_MODEL.slice(4)], asked, () => {
    const model = modelOf(asked);
    if (model.refused) {
      $("figures").replaceChildren(h("div", {}, h("b", {}, "not possible"), model.refused));
      return $("own-map").replaceChildren();
    }
    const {gpu, seconds, letters} = model, tokens = asked.B * asked.T * asked.G;
    const fits = model.total <= gpu.memory ? "it fits" : "it does not fit";
    $("figures").replaceChildren(...Object.entries({
      parameters: model.parameters.toLocaleString("en"), "channels C": letters.C,
      "memory of a GPU": sizeText(model.total), [`${gpu.name}: ${sizeText(gpu.memory)}`]: fits,
      "FLOPs for a token": model.flops.toExponential(3),
      "FLOPs of a step on a GPU": model.step.toExponential(3),
      "a step, about": seconds ? `${(1e3 * seconds).toPrecision(3)} ms` : "unknown",
      "tokens a second": seconds ? Math.round(tokens / seconds).toLocaleString("en") : "unknown",
    }).map(([name, value]) => h("div", {}, h("b", {}, `${value}`), name)));
    drawMemory("own-map", "your model", model);
  });
  $("own-note").textContent = `The time is the FLOPs at ${page.models.share} of the rate of a ` +
    `large product, as --dry-run reckons, which counts FP8 as bf16 and leaves out what GPUs send ` +
    `each other. That rate was measured on an ${measured.gpu} in bf16. ${
      Object.entries(measured.steps).map(([name, ms]) => `A measured step of ${measured.title} ` +
        `took ${ms} ms on an ${name}.`).join(" ")} Of other GPUs it is a guess, by multiprocessors ` +
    "and FLOPs a clock. Where GPUs share memory, --zero 1 takes 4 bytes a parameter more (--slots 0: " +
    "not). On a Hopper GPU, dev/ also keeps some MiB for sums of biases and attention.";
}
