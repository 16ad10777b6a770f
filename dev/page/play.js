// The microscope: a launch plays, request by request.
"use strict";

const play = {at: 0, timer: null, requests: [], speed: 4, draw() {}};

async function drawPlay() {
  stop();
  const launch = launches[state.launch];
  play.requests = [];
  if (launch.trace === undefined) {
    $("play").replaceChildren(h("p", {class: "soft"}, launch.name === "matmul"
      ? "A BLAS library multiplies the matrices: its threads are not ours to watch. Go to a kernel."
      : "The host does this itself."));
    return;
  }
  const requests = await requestsOf(launch.trace);
  if (launches[state.launch] !== launch) return;
  Object.assign(play, {requests, at: 0});
  const slider = h("input", {type: "range", min: 0, max: requests.length - 1, value: 0,
    "aria-label": "request", oninput: (event) => show(Number(event.target.value))});
  const toggle = button("play", () => play.timer ? stop() : start());
  const speeds = select("speed", [[1, "slow"], [4, "medium"], [30, "fast"]], play.speed, (value) => {
    play.speed = Number(value);
    if (play.timer) start();
  });
  const scene = h("div", {class: "scene"});
  play.draw = () => {
    slider.value = play.at;
    slider.setAttribute("aria-valuetext", `request ${play.at + 1} of ${requests.length}`);
    toggle.textContent = play.timer ? "pause" : "play";
    scene.replaceChildren(...sceneOf(launch, requests[play.at]));
  };
  $("play").replaceChildren(h("div", {class: "bar"}, button("step back", () => show(play.at - 1)),
    toggle, button("step", () => show(play.at + 1)), speeds, slider), scene,
    summaryOf(requests));
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
  if (play.requests.length) play.draw();
}

const DONE = {load: "loads", store: "stores", atomic: "changes atomically", copy: "copies"};
const NEAR = 8;  // blocks and warps that are drawn before the one at hand, and behind it

function chips(title, all, now) {
  const near = all.filter((i) => Math.abs(all.indexOf(i) - all.indexOf(all.findLast(
    (each) => each <= now) ?? all[0])) <= NEAR);
  return h("p", {}, `${title} `, near[0] > all[0] ? "… " : "", ...near.map((i) =>
    h("span", {class: `chip ${i === now ? "on" : i < now ? "past" : ""}`}, `${i}`)),
    near[near.length - 1] < all[all.length - 1] ? " …" : "");
}

function sceneOf(launch, request) {
  const {block, warp, kind, cost, least} = request, blocks = countOf(launch.grid);
  const processors = Math.min(page.loops.multiprocessors, blocks);
  const machine = h("div", {class: "machine"}, ...range(processors).map((p) => chips(
    `multiprocessor ${p}: blocks`, range(blocks).filter((b) => b % processors === p), block)),
    chips(`warps of block ${block}:`, range(Math.ceil(launch.block[0] / 32)), warp));
  if (kind >= BARRIER) {
    const text = kind === BARRIER ? `Barrier: all warps of block ${block} wait for each other`
      : `The lanes of warp ${warp} meet: they exchange numbers, or wait`;
    return [machine, h("p", {class: "barrier"}, h("strong", {}, text)), sourceOf(request.line)];
  }
  const shared = request.space < 0, argument = launch.arguments[request.space];
  const array = shared ? page.traces[launch.trace].spaces[-1 - request.space] : argument.name;
  const wanted = wantedBy(request);
  const moved = shared ? `Shared memory, ${cost} turns, ${least} without bank conflicts.`
    : `Moved: ${cost} sectors, ${32 * cost} bytes. Wanted: ${4 * wanted.size} bytes.`;
  const head = h("p", {}, h("strong", {},
    `Warp ${warp} of block ${block} ${DONE[KINDS[kind]]} ${array}: `),
    `${request.at.filter((x) => x !== null).length} lanes, ${request.bytes} bytes each. ${moved}`);
  const lanes = h("ol", {class: "lanes", start: 0}, ...request.at.map((word, lane) =>
    h("li", {class: word === null && "off"}, h("b", {}, `${lane} `),
      word === null ? "–" : laneText(request, argument, word))));
  return [machine, head, h("div", {class: "pair"}, lanes,
    h("div", {}, memoryOf(wanted, shared), sourceOf(request.line)))];
}
function laneText(request, argument, word) {
  const wide = request.bytes > 4, place = `[${word}${wide ? `..${word + request.bytes / 4 - 1}` : ""}]`;
  if (!argument) return place;
  const time = state.launch - (KINDS[request.kind] === "store" ? 0 : 1);
  const x = numberAt(argument.arena, argument.start + word, time);
  return `${place} ${shown(x, 3)}${wide ? " …" : ""}`;
}

// {word: the lanes that want it}
function wantedBy(request) {
  const wanted = new Map();
  request.at.forEach((word, lane) => {
    for (const i of range(word === null ? 0 : request.bytes / 4)) {
      wanted.set(word + i, [...(wanted.get(word + i) || []), lane]);
    }
  });
  return wanted;
}

// The sectors of a request, or its words of shared memory: who wants which 4 bytes.
function memoryOf(wanted, shared) {
  const rows = [...new Set([...wanted.keys()].map((word) => Math.floor(word / 8)))]
    .sort((a, b) => a - b), most = 16;
  const cell = (lanes) => lanes ? {class: "wanted", text: `${lanes[0]}${lanes[1] ? "+" : ""}`}
                                : {class: shared ? "" : "waste", text: "·"};
  return h("div", {}, tableOf(shared ? "Words of shared memory, and the lane that wants each"
    : "A row is a sector of 32 bytes. Blue: wanted, by this lane; orange stripes: moved for nothing",
    ["word", ...range(8).map((i) => `+${i}`)], rows.slice(0, most).map((row) =>
      [`${8 * row}`, ...range(8).map((i) => cell(wanted.get(8 * row + i)))]), "memory"),
    rows.length > most ? h("p", {class: "soft"}, `… and ${rows.length - most} more rows`) : "");
}

// What each line moves, in all.
function summaryOf(requests) {
  const lines = new Map();
  for (const {line, kind, space, cost, least} of requests.filter((r) => r.kind < BARRIER)) {
    const key = `${line} ${kind} ${space < 0}`;
    const sum = lines.get(key) || {line, kind, shared: space < 0, count: 0, cost: 0, least: 0};
    lines.set(key, {...sum, count: sum.count + 1, cost: sum.cost + cost, least: sum.least + least});
  }
  const barriers = requests.filter((r) => r.kind === BARRIER).length;
  const title = `What each line moves; ${barriers} barriers of blocks`;
  const rows = [...lines.values()].sort((a, b) => a.line - b.line).map((s) => [
    h("code", {}, `${s.line}  ${(page.source[s.line - 1] || "").trim().slice(0, 60)}`),
    KINDS[s.kind], `${s.count}`, `${s.cost} ${s.shared ? "turns" : "sectors"}`,
    s.cost > s.least ? {class: "waste", text: `${s.cost - s.least} wasted`} : "–"]);
  return h("details", {}, h("summary", {}, title),
    tableOf(title, ["line", "kind", "requests", "cost", "more than the least"], rows));
}
