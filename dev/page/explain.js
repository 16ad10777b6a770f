// How a number came about: for each output of a kernel its formula, worked out again from the
// launch's inputs. Each operand can be followed to its own story.
"use strict";

// A story is a list of parts: text, or {value, ref}; ref is {arena, word, time}. An operand is
// [argument, offset], and with true behind it, it is the number that the launch has written.
class Story {
  static MOST = 16;  // terms of a sum that are told

  constructor(number) {
    this.launch = launches[number];
    this.index = number;
    this.parts = [];
    this.formula = "";
    this.scalars = Object.fromEntries(this.launch.arguments.filter(({value}) => value !== null)
      .map(({name, value}) => [name, value]));
  }
  has(name) {
    return isArray(argumentOf(this.launch, name));
  }
  ref([name, offset, after]) {
    const {arena, start} = argumentOf(this.launch, name);
    return {arena, word: start + offset, time: after ? this.index : this.index - 1};
  }
  value(...operand) {
    const {arena, word, time} = this.ref(operand);
    return numberAt(arena, word, time);
  }
  // story.tell`${["x", 3]} + ${["bias", 1]}, ${7}`: operands become buttons. Their values.
  tell(texts, ...operands) {
    return texts.map((text, k) => {
      this.parts.push(text);
      if (k === operands.length) return null;
      const operand = operands[k];
      if (!Array.isArray(operand)) {
        this.parts.push(typeof operand === "number" ? shown(operand) : operand);
        return operand;
      }
      const value = this.value(...operand);
      this.parts.push({value, ref: this.ref(operand), label: `${operand[0]}[${operand[1]}]`});
      return value;
    });
  }
  // The sum of the terms of `count`, the first of which are told: term(i) is a list of factors,
  // numbers or operands.
  sum(count, term) {
    let total = 0;
    for (let i = 0; i < count; i++) {
      let product = 1;
      term(i).forEach((factor, k) => {
        const between = k ? "·" : i ? " + " : "";
        product *= i >= Story.MOST ? (Array.isArray(factor) ? this.value(...factor) : factor)
          : this.tell([between, ""], factor)[0];
      });
      total += product;
    }
    if (count > Story.MOST) this.tell([` + … ${count - Story.MOST} more`]);
    return total;
  }
}

function geluParts(x) {
  const u = Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3);
  const g = 0.5 * (1 + Math.tanh(u));
  const slope = Math.sqrt(2 / Math.PI) * (1 + 3 * 0.044715 * x * x);
  return {g, derivative: g + x * 2 * g * (1 - g) * slope};
}

// Attention's numbers for a query: q at t, the weights of the keys 0..t.
function attentionAt(story, head, t) {
  const {T, NH} = story.scalars, HS = sizes.HS;
  const b = Math.floor(head / NH), h = head % NH;
  const at = (which, row, d) => ((b * T + row) * 3 * NH + which * NH + h) * HS + d;
  const scores = [];
  for (let s = 0; s <= t; s++) {
    let dot = 0;
    for (let d = 0; d < HS; d++) {
      dot += story.value("qkv", at(0, t, d)) * story.value("qkv", at(1, s, d));
    }
    scores.push(dot * story.scalars.scale);
  }
  const top = Math.max(...scores);
  const total = scores.reduce((sum, x) => sum + Math.exp(x - top), 0);
  return {T, NH, HS, b, h, at, scores, weights: scores.map((x) => Math.exp(x - top) / total),
          lse: Math.log2(total) + top / Math.LN2};
}

// dscore[s] of a query t: weight * (dout v' - delta).
function scoreGradients(story, head, t) {
  const a = attentionAt(story, head, t);
  const out = (row, d) => ((a.b * a.T + row) * a.NH + a.h) * a.HS + d;
  const dots = a.weights.map((_, s) => {
    let dot = 0;
    for (let d = 0; d < a.HS; d++) {
      dot += story.value("dout", out(t, d)) * story.value("qkv", a.at(2, s, d));
    }
    return dot;
  });
  const delta = dots.reduce((sum, x, s) => sum + a.weights[s] * x, 0);
  return {...a, out, delta, dscores: dots.map((x, s) => a.weights[s] * (x - delta))};
}

function normRow(story, i) {
  const C = sizes.C, row = Math.floor(i / C);
  const x = [];
  for (let c = 0; c < C; c++) {
    const branch = story.has("branch") ? story.value("branch", row * C + c) : 0;
    x.push(story.value("x", row * C + c) + branch);
  }
  const mean = x.reduce((sum, v) => sum + v, 0) / C;
  const variance = x.reduce((sum, v) => sum + (v - mean) ** 2, 0) / C;
  return {C, row, c: i % C, x, mean, rstd: 1 / Math.sqrt(variance + 1e-5)};
}

function normAt(story, row, c) {
  return (story.value("inp", row * sizes.C + c) - story.value("mean", row)) * story.value("rstd", row);
}

function streamNumber(story, i) {
  return story.sum(story.has("branch") ? 2 : 1, (k) => [[k ? "branch" : "x", i]]);
}

// {kernel: {output: function of (story, offset), which tells and returns the number}}
const STORIES = {
  encoder_forward: {
    out(story, i) {
      const {T, C} = story.scalars, row = Math.floor(i / C), c = i % C;
      const token = story.value("tokens", row), letter = String.fromCharCode(token);
      story.formula = "wte[token] + wpe[position]";
      story.tell([`token ${token} (“${letter}”), position ${row % T}, channel ${c}: `]);
      return story.sum(2, (k) => [k ? ["wpe", row % T * C + c] : ["wte", token * C + c]]);
    },
  },
  encoder_backward_wte: {
    dwte(story, i) {
      const {N, C} = story.scalars, word = Math.floor(i / C), c = i % C;
      const rows = [...Array(N).keys()].filter((row) => story.value("tokens", row) === word);
      story.formula = "dwte[word] += dout[row] over the rows of that word";
      const [before] = story.tell`${["dwte", i]} (before) + `;
      return before + story.sum(rows.length, (k) => [["dout", rows[k] * C + c]]);
    },
  },
  encoder_backward_wpe: {
    dwpe(story, i) {
      const {B, T, C, adds} = story.scalars;
      story.formula = "dwpe[t] = the sum over sequences b of dout[b, t]";
      if (i >= T * C) return 0;
      const before = adds ? story.tell`${["dwpe", i]} (before) + `[0] : 0;
      return before + story.sum(B, (b) => [["dout", b * T * C + i]]);
    },
  },
  residual_layernorm_forward: {
    x(story, i) {
      story.formula = "x + branch";
      return streamNumber(story, i);
    },
    copy(story, i) {
      story.formula = "a copy of the stream x + branch, for the backward pass";
      return streamNumber(story, i);
    },
    mean(story, row) {
      const {C, x, mean} = normRow(story, row * sizes.C);
      story.formula = "the mean of the row of x + branch";
      story.tell([`(${x.slice(0, 8).map((v) => shown(v)).join(" + ")} + … ${C - 8} more) / ${C}`]);
      return mean;
    },
    rstd(story, row) {
      const {rstd} = normRow(story, row * sizes.C);
      story.formula = "1 / sqrt(variance of the row + 0.00001)";
      story.tell`1 / sqrt(${1 / rstd ** 2 - 1e-5} + 0.00001)`;
      return rstd;
    },
    out(story, i) {
      const {row, c} = normRow(story, i);
      story.formula = "(x − mean) · rstd · weight + bias";
      story.tell([`row ${row}, channel ${c}: (`]);
      const x = streamNumber(story, i);
      const [mean, rstd, weight, bias] = story.tell` − ${["mean", row, true]}) · ${
        ["rstd", row, true]} · ${["weight", c]} + ${["bias", c]}`;
      return (x - mean) * rstd * weight + bias;
    },
  },
  layernorm_backward: {
    dresidual(story, i) {
      const C = sizes.C, row = Math.floor(i / C), c = i % C;
      story.formula = "dresidual + rstd · (dnorm − average(dnorm) − norm · average(dnorm · norm)), " +
                      "dnorm = dout · weight, norm = (inp − mean) · rstd";
      const norm = (k) => normAt(story, row, k);
      const dnorm = (k) => story.value("dout", row * C + k) * story.value("weight", k);
      let first = 0, second = 0;
      for (let k = 0; k < C; k++) {
        first += dnorm(k) / C;
        second += dnorm(k) * norm(k) / C;
      }
      const [before, rstd, dout, weight] = story.tell`${["dresidual", i]} + ${["rstd", row]} · (${
        ["dout", i]}·${["weight", c]} − ${first} − ${norm(c)} · ${second})`;
      return before + rstd * (dout * weight - first - norm(c) * second);
    },
    partials(story, i) {
      const C = sizes.C, N = story.scalars.N, blocks = story.launch.grid[0];
      const which = Math.floor(i / (blocks * C)), block = Math.floor(i / C) % blocks, c = i % C;
      const rows = story.launch.block[0] / page.loops.row_threads;
      const own = [...Array(N).keys()].filter((row) => Math.floor(row / rows) % blocks === block);
      story.formula = which ? "this block's sum of dout over its rows: a part of the bias's gradient"
        : "this block's sum of dout · norm over its rows: a part of the weight's gradient";
      story.tell([`block ${block}, rows ${own.join(", ")}, channel ${c}: `]);
      return story.sum(own.length, (k) => [["dout", own[k] * C + c],
                                           ...(which ? [] : [normAt(story, own[k], c)])]);
    },
  },
  matmul_backward_bias: {
    partials(story, i) {
      const {N, OC} = story.scalars, shares = story.launch.grid[1];
      const rows = Math.ceil(N / (32 * shares)) * 32, first = Math.floor(i / OC) * rows;
      story.formula = "the sum of a column of dout over this block's rows";
      return story.sum(Math.min(rows, N - first), (row) => [["dout", (first + row) * OC + i % OC]]);
    },
  },
  add_partials: {
    out1: (story, i) => addPartials(story, "out1", i, 0),
    out2: (story, i) => addPartials(story, "out2", i, story.scalars.blocks * story.scalars.C),
  },
  gelu_forward: {
    out(story, i) {
      story.formula = "gelu(x) = x/2 · (1 + tanh(sqrt(2/pi) · (x + 0.044715 x³)))";
      const {g} = geluParts(story.value("inp", i));
      return story.sum(1, () => [["inp", i], g]);
    },
  },
  gelu_backward: {
    dinp(story, i) {
      story.formula = "the gradient of the output · GELU's derivative at inp";
      const {derivative} = geluParts(story.value("inp", i));
      const [d] = story.tell`${["dinp", i]} · gelu′(${["inp", i]}) = … · ${derivative}`;
      return d * derivative;
    },
  },
  fused_classifier: {
    losses(story, row) {
      const {V, Vp} = story.scalars, target = story.value("targets", row);
      const {top, total} = softmaxRow(story, row, V, Vp), log = Math.log(total) + top;
      story.formula = "−log(softmax(logits)[target]) = log(Σ e^logit) − logit of the target";
      story.tell([`target ${target} (“${String.fromCharCode(target)}”), ${V} words: `]);
      const [, logit] = story.tell`${log} − ${["logits", row * Vp + target]}`;
      return log - logit;
    },
    logits(story, i) {
      const {V, Vp, dloss} = story.scalars, row = Math.floor(i / Vp), v = i % Vp;
      const {top, total} = softmaxRow(story, row, V, Vp);
      const hot = v === story.value("targets", row) ? 1 : 0;
      story.formula = "the logit becomes its gradient: dloss · (softmax − onehot)";
      const [, logit] = story.tell`${dloss} · (e^${["logits", i]} / ${total * Math.exp(top)} − ${hot})`;
      return v < V ? dloss * (Math.exp(logit - top) / total - hot) : 0;
    },
  },
  add_loss: {
    verdict(story, i) {
      const {N, factor, adds} = story.scalars;
      story.formula = "the mean of the tokens' losses";
      story.tell`${factor} · (`;
      const total = story.sum(N, (k) => [["losses", k]]);
      story.tell`)`;
      return (adds ? story.value("verdict", i) : 0) + factor * total;
    },
  },
  global_norm: {
    gradient_norm(story, i) {
      const {n} = story.scalars, blocks = story.launch.grid[0], threads = story.launch.block[0];
      story.formula = ["the square root of the sum of the squares of all gradients",
                       "how many blocks are done; 0 again at the end"][i] ||
                      "this block's sum of squares of gradients";
      let sum = 0;
      for (let k = 0; k < n; k++) {
        const own = i === 0 || Math.floor(k / 4 / threads) % blocks === i - 2;
        sum += own ? story.value("grads", k) ** 2 : 0;
      }
      story.tell`squares: ${sum}`;
      return i === 0 ? Math.sqrt(sum) : i === 1 ? 0 : sum;
    },
  },
  judge: {
    verdict(story, i) {
      story.formula = ["the gradient's norm", "the loss, as it was",
                       "1: update, unless stopped", "1 once a loss or norm was not finite"][i];
      if (i < 2) return story.tell`${i ? ["verdict", 1] : ["gradient_norm", 0]}`[0];
      const stopped = Number.isFinite(story.value("verdict", 1)) ? story.value("verdict", 3) : 1;
      return i === 2 ? 1 - stopped : stopped;
    },
  },
  adamw: {
    params(story, i) {
      const a = adamwOf(story, i);
      story.formula = "p − learning_rate · (m·correction1 / (sqrt(v·correction2) + eps) + weight_decay·p)";
      story.tell`${["params", i]} − ${a.learning_rate} · (${["m", i, true]}·${a.correction1} / (sqrt(${
        ["v", i, true]}·${a.correction2}) + ${a.eps}) + ${a.decay}·${a.before})`;
      return a.p;
    },
    m(story, i) {
      const a = adamwOf(story, i);
      story.formula = "m + (1 − beta1) · (g − m), g the gradient, scaled if its norm exceeds clip";
      story.tell`${["m", i]} + ${a.rate1} · (${["grads", i]}·${a.scale} − ${story.value("m", i)})`;
      return a.m;
    },
    v(story, i) {
      const a = adamwOf(story, i);
      story.formula = "v + (1 − beta2) · (g² − v)";
      story.tell`${["v", i]} + ${a.rate2} · ((${["grads", i]}·${a.scale})² − ${story.value("v", i)})`;
      return a.v;
    },
  },
  attention_forward: {
    out(story, i) {
      const {HS, NH} = sizes, T = story.scalars.T;
      const d = i % HS, h = Math.floor(i / HS) % NH, n = Math.floor(i / HS / NH);
      const a = attentionAt(story, Math.floor(n / T) * NH + h, n % T);
      story.formula = "Σ over tokens s ≤ t of softmax(q·k / sqrt(HS))[s] · v[s]";
      story.tell([`sequence ${a.b}, head ${h}, token ${n % T}, channel ${d}: `]);
      return story.sum(a.weights.length, (s) => [a.weights[s], ["qkv", a.at(2, s, d)]]);
    },
    lse(story, i) {
      const T = story.scalars.T, a = attentionAt(story, Math.floor(i / T), i % T);
      const words = (list) => list.map((x) => shown(x)).join(", ");
      story.formula = "log2 of the sum of e^score over the tokens up to this one";
      story.tell([`scores ${words(a.scores)}; weights ${words(a.weights)}`]);
      return a.lse;
    },
  },
  attention_backward_q: {
    dqkv(story, i) {
      const {HS, NH} = sizes, {T, scale} = story.scalars, d = i % HS, h = Math.floor(i / HS) % NH;
      const n = Math.floor(i / HS / NH / 3);
      const a = scoreGradients(story, Math.floor(n / T) * NH + h, n % T);
      story.formula = "dq = scale · Σ over tokens s of dscore[s] · k[s]";
      return story.sum(a.dscores.length, (s) => [scale, a.dscores[s], ["qkv", a.at(1, s, d)]]);
    },
    delta(story, i) {
      const T = story.scalars.T, t = i % T, a = scoreGradients(story, Math.floor(i / T), t);
      story.formula = "the sum of out · dout over the channels of the head";
      return story.sum(sizes.HS, (d) => [["out", a.out(t, d)], ["dout", a.out(t, d)]]);
    },
  },
  attention_backward_kv: {
    dqkv(story, i) {
      const {HS, NH} = sizes, {T, scale} = story.scalars, d = i % HS, h = Math.floor(i / HS) % NH;
      const which = Math.floor(i / HS / NH) % 3, n = Math.floor(i / HS / NH / 3), s = n % T;
      story.formula = which === 1 ? "dk = scale · Σ over tokens t ≥ s of dscore[t] · q[t]"
                                  : "dv = Σ over tokens t ≥ s of weight[t] · dout[t]";
      return story.sum(T - s, (k) => {
        const a = scoreGradients(story, Math.floor(n / T) * NH + h, s + k);
        return which === 1 ? [scale, a.dscores[s], ["qkv", a.at(0, s + k, d)]]
                           : [a.weights[s], ["dout", a.out(s + k, d)]];
      });
    },
  },
  zero: {
    array(story) {
      story.formula = "all bits are set to 0";
      return 0;
    },
  },
};

function addPartials(story, name, c, from) {
  const {blocks, C, adds} = story.scalars;
  story.formula = "the sum of what each block has written to partials" +
                  (adds ? ", added to earlier micro-batches" : "");
  const before = adds ? story.value(name, c) : 0;
  return before + story.sum(blocks, (block) => [["partials", from + block * C + c]]);
}

function softmaxRow(story, row, V, Vp) {
  let top = -Infinity, total = 0;
  for (let v = 0; v < V; v++) top = Math.max(top, story.value("logits", row * Vp + v));
  for (let v = 0; v < V; v++) total += Math.exp(story.value("logits", row * Vp + v) - top);
  return {top, total};
}

// AdamW's numbers for number i of the arenas.
function adamwOf(story, i) {
  const a = {};
  page.settings.forEach((name, k) => { a[name] = story.value("settings", k); });
  const arena = argumentOf(story.launch, "params");
  const tensor = tensorAt(arena.arena, arena.start + i);
  const names = [...new Set(tensorsOf[arena.arena].map((each) => each.name))];
  a.decay = story.value("decayed", names.indexOf(tensor.name)) ? a.weight_decay : 0;
  const norm = story.value("verdict", 0);
  a.scale = a.clip > 0 && norm > a.clip ? a.clip / norm : 1;
  a.g = story.value("grads", i) * a.scale;
  a.before = story.value("params", i);
  a.m = story.value("m", i) + a.rate1 * (a.g - story.value("m", i));
  a.v = story.value("v", i) + a.rate2 * (a.g * a.g - story.value("v", i));
  a.change = a.m * a.correction1 / (Math.sqrt(a.v * a.correction2) + a.eps);
  a.p = a.before - a.learning_rate * (a.change + a.decay * a.before);
  return a;
}

function matmulStory(story, word) {
  const [out, left, right, bias] = ["out", "left", "right", "bias"].map(
    (name) => argumentOf(story.launch, name));
  const at = word - out.start, I = Math.floor(at / out.strides[0]), J = at % out.strides[0];
  const side = (argument, plain, transposed, index) =>  // numbers of a row lie side by side
    `${argument.strides[1] === 1 ? plain : transposed} ${index} of ` +
    nameOf(tensorAt(argument.arena, argument.start));
  story.formula = `${side(left, "row", "column", I)} · ${side(right, "column", "row", J)}` +
    (isArray(bias) ? ` + ${nameOf(tensorAt(bias.arena, bias.start), `[${J}]`)}` : "");
  const before = story.scalars.accumulate ? story.tell`${["out", at]} (before) + `[0] : 0;
  const sum = story.sum(left.shape[1], (k) => [
    ["left", I * left.strides[0] + k * left.strides[1]],
    ["right", k * right.strides[0] + J * right.strides[1]]]);
  return before + sum + (isArray(bias) ? story.tell` + ${["bias", J]}`[0] : 0);
}

// {launch, output, formula, parts, value, found}: how the number of a word came about that is
// there at a time. value is what the formula gives, found what the launch stored. null: no launch
// of the step wrote it before.
function storyOf(arena, word, time) {
  const tensor = tensorAt(arena, word);
  const number = writerOf(tensor, word - tensor.start, time);
  if (number < 0) return null;
  const launch = launches[number], found = numberAt(arena, word, number);
  const output = argumentAt(launch, arena, word, true);
  const story = new Story(number);
  let value = found;
  if (launch.name === "matmul") value = matmulStory(story, word);
  else if (launch.name === "put") story.formula = "the host has copied it to the device";
  else if (STORIES[launch.name] && STORIES[launch.name][output.name]) {
    value = STORIES[launch.name][output.name](story, word - output.start);
  } else story.formula = "see the kernel's comment";
  return {number, launch, output, formula: story.formula, parts: story.parts, value, found};
}
