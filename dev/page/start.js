// Starts the page: keys, the first launch.
"use strict";

const KEYS = {n: () => goTo(state.launch + 1), p: () => goTo(state.launch - 1),
              j: () => goToLit(1), k: () => goToLit(-1)};
document.addEventListener("keydown", (event) => {
  const own = event.ctrlKey || event.metaKey || event.altKey ||
              event.target.matches("select, input:not([type=range])");
  if (!own && KEYS[event.key]) KEYS[event.key]();
});
for (const id of ["previous", "map-previous"]) $(id).addEventListener("click", KEYS.p);
for (const id of ["next", "map-next"]) $(id).addEventListener("click", KEYS.n);
$("strip").addEventListener("keydown", (event) => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!step) return;
  event.preventDefault();
  goTo(state.launch + step);
  $("strip").querySelector('[aria-current="step"]').focus();
});
$("launch").addEventListener("keydown", keyInTable);
$("launch").addEventListener("click", ({target}) => {
  const cell = target.closest(".numbers td");
  if (cell) chooseCell(cell);
});
$("map-launch").max = launches.length - 1;
$("map-launch").addEventListener("input", ({target}) => goTo(Number(target.value)));

// The bytes of a sequence of the batch.
function textOf(b) {
  const {tokens} = Object.fromEntries(tensors.map((tensor) => [tensor.name, tensor]));
  const bytes = valuesAt(tokens, launches.length).slice(b * sizes.T, (b + 1) * sizes.T);
  return `“${String.fromCharCode(...bytes)}”`;
}
$("lead").textContent = `Step ${page.step} of a tiny model: ${sizes.L} layers, ${sizes.NH} heads, ` +
  `C = ${sizes.C}, B = ${sizes.B}, T = ${sizes.T}, ${sizes.parameters.toLocaleString("en")} ` +
  `parameters, in fp32. It reads ${range(sizes.B).map(textOf).join(" and ")} byte by byte, and ` +
  `learns what comes after each; its loss is ` +
  `${shown(page.verdict.loss)}. Every number is the trainer's own: kernels.cu ran thread by thread ` +
  "on a CPU.";
document.querySelector("main").hidden = false;  // all at once: nothing jumps
$("phases").replaceWith(legend(["forward", "forward pass"], ["loss", "loss"],
  ["backward", "backward pass"], ["update", "update"]));
$("uses").replaceWith(legend(["high", "written now"], ["reading", "read now"],
  ["alive", "will be read"], ["dead", "nobody reads it again"]));
drawCode();
drawDifferences();
drawMeasured();
drawOwn();
onLaunch.push(drawMap);
goTo(Math.max(0, launches.findIndex((launch) => launch.name === "residual_layernorm_forward")));
