// How a number came about: for each output of a kernel its formula, in words and in the numbers that
// the launch read. What is told is also worked out: its value must be the number that was stored.
"use strict";

// A formula in numbers is a list of parts: text, {value, label, ref} of an operand, which ref =
// {arena, word, time} follows to its own story, or {more}, parts that are too many to tell. An operand
// is [argument, offset], with true behind it if it is the number that the launch has written.
class Story {
  static MOST = 16;  // terms of a sum that are told

  constructor(number) {
    this.launch = launches[number];
    this.number = number;
    this.scalars = Object.fromEntries(this.launch.arguments.filter(({value}) => value !== null)
      .map(({name, value}) => [name, value]));
  }
  has(name) {
    return isArray(argumentOf(this.launch, name));
  }
  operand([name, offset, after]) {
    const {arena, start} = argumentOf(this.launch, name);
    const ref = {arena, word: start + offset, time: after ? this.number : this.number - 1};
    return {value: numberAt(ref.arena, ref.word, ref.time), label: `${name}[${offset}]`, ref};
  }
  value(...operand) {
    return this.operand(operand).value;
  }
  // story.tell`${["x", 3]} + ${7} · ${parts}`
  tell(texts, ...operands) {
    const parts = operands.map((operand) => typeof operand === "number" ? [{value: operand}]
      : typeof operand[0] === "string" && operand.length > 1 && typeof operand[1] === "number"
        ? [this.operand(operand)] : operand);
    return texts.flatMap((text, k) => [text, ...(parts[k] || [])]);
  }
  // The sum of `count` terms, of which the first are told; term(i) is a list of parts.
  sum(count, term) {
    const terms = range(count).map((i) => i ? [" + ", ...term(i)] : term(i));
    const more = terms.slice(Story.MOST).flat();
    return ["(", ...(count ? terms.slice(0, Story.MOST).flat() : ["0"]),
            ...(more.length ? [{more, text: ` + ${count - Story.MOST} more`}] : []), ")"];
  }
}

function workedOut(parts) {
  const text = parts.map((part) => typeof part === "string" ? part
    : part.more ? sourceText(part.more) : `(${part.value})`).join("");
  return Function("{sqrt, exp, log, log2, PI, tanh}", `return ${inScript(text)}`)(Math);
}
function sourceText(parts) {
  return parts.map((part) => part.value === undefined ? part : `(${part.value})`).join("");
}
function inScript(text) {
  return text.replace(/·/g, "*").replace(/−/g, "-").replace(/²/g, "**2").replace(/³/g, "**3")
    .replace(/π/g, "PI");
}

// Attention's numbers for a query: q at t, the weights of the keys 0..t.
function attentionAt(story, head, t) {
  const {T, NH} = story.scalars, HS = sizes.HS;
  const b = Math.floor(head / NH), own = head % NH;
  const at = (which, row, d) => ((b * T + row) * 3 * NH + which * NH + own) * HS + d;
  const scores = range(t + 1).map((s) => story.scalars.scale * range(HS).reduce(
    (dot, d) => dot + story.value("qkv", at(0, t, d)) * story.value("qkv", at(1, s, d)), 0));
  const top = Math.max(...scores);
  const total = scores.reduce((sum, x) => sum + Math.exp(x - top), 0);
  return {b, at, scores, weights: scores.map((x) => Math.exp(x - top) / total),
          out: (row, d) => ((b * T + row) * NH + own) * HS + d};
}

// The same with dscores[s] of a query t: weight · (dout · v − delta).
function scoreGradients(story, head, t) {
  const a = attentionAt(story, head, t);
  const dots = a.weights.map((_, s) => range(sizes.HS).reduce((dot, d) =>
    dot + story.value("dout", a.out(t, d)) * story.value("qkv", a.at(2, s, d)), 0));
  const delta = dots.reduce((sum, x, s) => sum + a.weights[s] * x, 0);
  return {...a, dscores: dots.map((x, s) => a.weights[s] * (x - delta))};
}

// Where a number of out, or of qkv with `three`, is: {head of its sequence, t, d, which}.
function placeInHeads(story, i, three = 1) {
  const {HS, NH} = sizes, T = story.scalars.T, n = Math.floor(i / HS / NH / three);
  return {d: i % HS, head: Math.floor(n / T) * NH + Math.floor(i / HS) % NH, t: n % T,
          which: Math.floor(i / HS / NH) % three};
}

const stream = (s, i) => s.has("branch") ? s.tell`${["x", i]} + ${["branch", i]}`
                                         : s.tell`${["x", i]}`;
const rowOf = (i) => Math.floor(i / sizes.C);
const norm = (s, row, c) =>
  s.tell`(${["inp", row * sizes.C + c]} − ${["mean", row]}) · ${["rstd", row]}`;

function addPartials(s, name, c, from) {
  const {blocks, C, adds} = s.scalars;
  const sum = s.sum(blocks, (block) => s.tell`${["partials", from + block * C + c]}`);
  return adds ? s.tell`${[name, c]} + ${sum}` : sum;
}

// log of the sum of e^logit of a row.
function logSum(s, row) {
  const logits = range(s.scalars.V).map((v) => s.value("logits", row * s.scalars.Vp + v));
  const top = Math.max(...logits);
  return top + Math.log(logits.reduce((sum, x) => sum + Math.exp(x - top), 0));
}

// AdamW's numbers for number i of the arenas.
function adamwOf(story, i) {
  const a = Object.fromEntries(page.settings.map((name, k) => [name, story.value("settings", k)]));
  const arena = argumentOf(story.launch, "params");
  const tensor = tensorAt(arena.arena, arena.start + i);
  const names = [...new Set(tensorsOf[arena.arena].map((each) => each.name))];
  a.decay = story.value("decayed", names.indexOf(tensor.name)) ? a.weight_decay : 0;
  const length = story.value("verdict", 0);
  a.scale = a.clip > 0 && length > a.clip ? a.clip / length : 1;
  return a;
}

// {"kernel output": [the formula in words, in numbers: (story, offset) => parts]}
const STORIES = {
  "encoder_forward out": [(s, i) => `wte[token] + wpe[position], of the token “${
    String.fromCharCode(s.value("tokens", rowOf(i)))}”`, (s, i) =>
    s.tell`${["wte", s.value("tokens", rowOf(i)) * sizes.C + i % sizes.C]} + ${
      ["wpe", i % (s.scalars.T * sizes.C)]}`],
  "encoder_backward_wte dwte": ["dwte[word] += dout[row] over the rows of that word", (s, i) => {
    const rows = range(s.scalars.N).filter((row) => s.value("tokens", row) === rowOf(i));
    return s.tell`${["dwte", i]} + ${s.sum(rows.length, (k) =>
      s.tell`${["dout", rows[k] * sizes.C + i % sizes.C]}`)}`;
  }],
  "encoder_backward_wpe dwpe": ["dwpe[t] = the sum over sequences b of dout[b, t]", (s, i) => {
    const {B, T, C, adds} = s.scalars;
    const sum = s.sum(i < T * C ? B : 0, (b) => s.tell`${["dout", b * T * C + i]}`);
    return adds ? s.tell`${["dwpe", i]} + ${sum}` : sum;
  }],
  "residual_layernorm_forward x": ["x + branch", stream],
  "residual_layernorm_forward copy":
    ["a copy of the stream x + branch, for the backward pass", stream],
  "residual_layernorm_forward mean": ["the mean of the row of x + branch", (s, row) =>
    s.tell`${s.sum(sizes.C, (c) => s.tell`${["x", row * sizes.C + c, true]}`)} / ${sizes.C}`],
  "residual_layernorm_forward rstd": ["1 / sqrt(variance of the row + 0.00001)", (s, row) =>
    s.tell`1 / sqrt(${s.sum(sizes.C, (c) =>
      s.tell`(${["x", row * sizes.C + c, true]} − ${["mean", row, true]})²`)} / ${
        sizes.C} + 0.00001)`],
  "residual_layernorm_forward out": ["(x − mean) · rstd · weight + bias", (s, i) =>
    s.tell`(${stream(s, i)} − ${["mean", rowOf(i), true]}) · ${["rstd", rowOf(i), true]} · ${
      ["weight", i % sizes.C]} + ${["bias", i % sizes.C]}`],
  "layernorm_backward dresidual": ["dresidual + rstd · (dnorm − average(dnorm) − norm · " +
    "average(dnorm · norm)), dnorm = dout · weight, norm = (inp − mean) · rstd", (s, i) => {
    const C = sizes.C, row = rowOf(i), c = i % C;
    const dnorm = (k) => s.value("dout", row * C + k) * s.value("weight", k);
    const first = range(C).reduce((sum, k) => sum + dnorm(k) / C, 0);
    const second = range(C).reduce((sum, k) => sum + dnorm(k) * workedOut(norm(s, row, k)) / C, 0);
    return s.tell`${["dresidual", i]} + ${["rstd", row]} · (${["dout", i]} · ${["weight", c]} − ${
      first} − ${norm(s, row, c)} · ${second})`;
  }],
  "layernorm_backward partials": [
    "this block's sum over its rows, of dout · norm for the weight's gradient, of dout for the " +
    "bias's", (s, i) => {
    const C = sizes.C, blocks = s.launch.grid[0], block = rowOf(i) % blocks;
    const each = s.launch.block[0] / page.loops.row_threads;
    const rows = range(s.scalars.N).filter((row) => Math.floor(row / each) % blocks === block);
    return s.sum(rows.length, (k) => i < blocks * C
      ? s.tell`${["dout", rows[k] * C + i % C]} · ${norm(s, rows[k], i % C)}`
      : s.tell`${["dout", rows[k] * C + i % C]}`);
  }],
  "matmul_backward_bias partials": ["the sum of a column of dout over this block's rows", (s, i) => {
    const {N, OC} = s.scalars, rows = Math.ceil(N / (32 * s.launch.grid[1])) * 32;
    const first = Math.floor(i / OC) * rows;
    return s.sum(Math.min(rows, N - first), (row) =>
      s.tell`${["dout", (first + row) * OC + i % OC]}`);
  }],
  "add_partials out1": ["the sum of what each block has written to partials", (s, i) =>
    addPartials(s, "out1", i, 0)],
  "add_partials out2": ["the sum of what each block has written to partials", (s, i) =>
    addPartials(s, "out2", i, s.scalars.blocks * s.scalars.C)],
  "gelu_forward out": ["gelu(x) = x/2 · (1 + tanh(sqrt(2/pi) · (x + 0.044715 x³)))", (s, i) =>
    s.tell`${["inp", i]} / 2 · (1 + tanh(sqrt(2/π) · (${["inp", i]} + 0.044715 · ${
      ["inp", i]}³)))`],
  "gelu_backward dinp": ["the gradient of the output · GELU's derivative at inp", (s, i) => {
    const x = s.value("inp", i), slope = Math.sqrt(2 / Math.PI) * (1 + 3 * 0.044715 * x * x);
    const half = 0.5 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
    return s.tell`${["dinp", i]} · (${half} + ${["inp", i]} · ${2 * half * (1 - half) * slope})`;
  }],
  "fused_classifier losses": [
    "−log(softmax(logits)[target]) = log(Σ e^logit) − logit of the target", (s, row) =>
    s.tell`${logSum(s, row)} − ${["logits", row * s.scalars.Vp + s.value("targets", row)]}`],
  "fused_classifier logits": [
    "the logit becomes its gradient: dloss · (softmax − 1 at the target, else 0)", (s, i) => {
    const {V, Vp, dloss} = s.scalars, row = Math.floor(i / Vp);
    if (i % Vp >= V) return ["0"];
    const hot = i % Vp === s.value("targets", row) ? 1 : 0;
    return s.tell`${dloss} · (exp(${["logits", i]} − ${logSum(s, row)}) − ${hot})`;
  }],
  "add_loss verdict": ["the mean of the tokens' losses", (s, i) => {
    const sum = s.tell`${s.scalars.factor} · ${s.sum(s.scalars.N, (k) => s.tell`${["losses", k]}`)}`;
    return s.scalars.adds ? s.tell`${["verdict", i]} + ${sum}` : sum;
  }],
  "global_norm gradient_norm": ["first the square root of the sum of the squares of all gradients; " +
    "then how many blocks are done, 0 again at the end; then each block's sum", (s, i) => {
    const blocks = s.launch.grid[0], threads = s.launch.block[0];
    const own = (k) => i === 0 || Math.floor(k / 4 / threads) % blocks === i - 2;
    const squares = range(s.scalars.n).reduce(
      (sum, k) => own(k) ? sum + s.value("grads", k) ** 2 : sum, 0);
    return i === 0 ? s.tell`sqrt(${squares})` : i === 1 ? ["0"] : s.tell`${squares}`;
  }],
  "judge verdict": ["the gradient's norm, the loss, 1: update, unless stopped, and 1 once a loss or " +
    "norm was not finite", (s, i) => {
    const stopped = Number.isFinite(s.value("verdict", 1)) ? s.value("verdict", 3) : 1;
    return [s.tell`${["gradient_norm", 0]}`, s.tell`${["verdict", 1]}`, s.tell`1 − ${stopped}`,
            s.tell`${stopped}`][i];
  }],
  "adamw params": ["p − learning_rate · (m·correction1 / (sqrt(v·correction2) + eps) + " +
    "weight_decay·p)", (s, i) => {
    const a = adamwOf(s, i);
    return s.tell`${["params", i]} − ${a.learning_rate} · (${["m", i, true]} · ${a.correction1} / (sqrt(${
      ["v", i, true]} · ${a.correction2}) + ${a.eps}) + ${a.decay} · ${["params", i]})`;
  }],
  "adamw m": ["m + (1 − beta1) · (g − m), g the gradient, scaled if its norm exceeds clip", (s, i) => {
    const a = adamwOf(s, i);
    return s.tell`${["m", i]} + ${a.rate1} · (${["grads", i]} · ${a.scale} − ${["m", i]})`;
  }],
  "adamw v": ["v + (1 − beta2) · (g² − v)", (s, i) => {
    const a = adamwOf(s, i);
    return s.tell`${["v", i]} + ${a.rate2} · ((${["grads", i]} · ${a.scale})² − ${["v", i]})`;
  }],
  "attention_forward out": ["Σ over tokens s ≤ t of softmax(q·k / sqrt(HS))[s] · v[s]", (s, i) => {
    const {head, t, d} = placeInHeads(s, i), a = attentionAt(s, head, t);
    return s.sum(t + 1, (k) => s.tell`${a.weights[k]} · ${["qkv", a.at(2, k, d)]}`);
  }],
  "attention_forward lse": ["log2 of the sum of e^score over the tokens up to this one", (s, i) => {
    const a = attentionAt(s, Math.floor(i / s.scalars.T), i % s.scalars.T);
    return s.tell`log2${s.sum(a.scores.length, (k) => s.tell`exp(${a.scores[k]})`)}`;
  }],
  "attention_backward_q dqkv": ["dq = scale · Σ over tokens s of dscore[s] · k[s]", (s, i) => {
    const {head, t, d} = placeInHeads(s, i, 3), a = scoreGradients(s, head, t);
    return s.tell`${s.scalars.scale} · ${s.sum(t + 1, (k) =>
      s.tell`${a.dscores[k]} · ${["qkv", a.at(1, k, d)]}`)}`;
  }],
  "attention_backward_q delta": ["the sum of out · dout over the channels of the head", (s, i) => {
    const t = i % s.scalars.T, a = attentionAt(s, Math.floor(i / s.scalars.T), t);
    return s.sum(sizes.HS, (d) => s.tell`${["out", a.out(t, d)]} · ${["dout", a.out(t, d)]}`);
  }],
  "attention_backward_kv dqkv": ["dk = scale · Σ over tokens t ≥ s of dscore[t] · q[t]; " +
    "dv = Σ over tokens t ≥ s of weight[t] · dout[t]", (s, i) => {
    const {head, t: key, d, which} = placeInHeads(s, i, 3);
    return s.sum(s.scalars.T - key, (k) => {
      const a = scoreGradients(s, head, key + k);
      return which === 1
        ? s.tell`${s.scalars.scale} · ${a.dscores[key]} · ${["qkv", a.at(0, key + k, d)]}`
        : s.tell`${a.weights[key]} · ${["dout", a.out(key + k, d)]}`;
    });
  }],
  "zero array": ["all bits are set to 0", () => ["0"]],
};

// A product's number as a row times a column.
function matmulStory(s, word) {
  const [out, left, right, bias] = ["out", "left", "right", "bias"].map(
    (name) => argumentOf(s.launch, name));
  const at = word - out.start, I = Math.floor(at / out.strides[0]), J = at % out.strides[0];
  const side = (argument, plain, transposed, index) =>  // numbers of a row lie side by side
    `${argument.strides[1] === 1 ? plain : transposed} ${index} of ` +
    nameOf(tensorAt(argument.arena, argument.start));
  const sum = s.sum(left.shape[1], (k) =>
    s.tell`${["left", I * left.strides[0] + k * left.strides[1]]} · ${
      ["right", k * right.strides[0] + J * right.strides[1]]}`);
  const parts = s.scalars.accumulate ? s.tell`${["out", at]} + ${sum}` : sum;
  const words = `${side(left, "row", "column", I)} · ${side(right, "column", "row", J)}`;
  if (!isArray(bias)) return [words, parts];
  return [`${words} + ${nameOf(tensorAt(bias.arena, bias.start), `[${J}]`)}`,
          s.tell`${parts} + ${["bias", J]}`];
}

// {number, launch, formula, parts, value, found}: how the number of a word came about that is there
// at a time. value is what the formula gives, found what the launch stored. null: no launch of the
// step wrote it before.
function storyOf(arena, word, time) {
  const tensor = tensorAt(arena, word);
  const number = writerOf(tensor, word - tensor.start, time);
  if (number < 0) return null;
  const launch = launches[number], found = numberAt(arena, word, number);
  const output = argumentAt(launch, arena, word, true), story = new Story(number);
  const at = word - output.start;
  const [words, told] = STORIES[`${launch.name} ${output.name}`] ||
                        ["the host has copied it to the device", () => []];
  const [formula, parts] = launch.name === "matmul" ? matmulStory(story, word)
    : [words instanceof Function ? words(story, at) : words, told(story, at)];
  return {number, launch, formula, parts, value: parts.length ? workedOut(parts) : found, found};
}
