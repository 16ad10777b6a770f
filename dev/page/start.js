// Starts the page: keys, the first launch.
"use strict";

$("theme").addEventListener("click", drawLaunch);  // whose pictures have the old colours
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT/.test(event.target.tagName)) return;
  if (event.key === "n") goTo(state.launch + 1);
  if (event.key === "p") goTo(state.launch - 1);
  if (event.key === "j") goToLit(1);
  if (event.key === "k") goToLit(-1);
});
$("previous").addEventListener("click", () => goTo(state.launch - 1));
$("next").addEventListener("click", () => goTo(state.launch + 1));
$("strip").addEventListener("keydown", (event) => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (!step) return;
  event.preventDefault();
  goTo(state.launch + step);
  $("strip").querySelector('[aria-current="true"]').focus();
});

const {loss} = page.verdict;
$("lead").textContent = `Step ${page.step} of a tiny model: ${sizes.L} layers, ${sizes.NH} heads, ` +
  `C = ${sizes.C}, B = ${sizes.B}, T = ${sizes.T}, ${sizes.parameters.toLocaleString("en")} ` +
  `parameters, in fp32. It reads “${page.text.slice(0, 39)} …” byte by byte, and its loss is ` +
  `${shown(loss)}. Every number is the trainer's own: kernels.cu ran thread by thread on a CPU.`;
$("made").textContent = `Made by python -m dev.tools.page from train_gpt2.py and kernels.cu` +
  (page.commit ? ` at ${page.commit}.` : ".");
drawStrip();
drawCode();
drawDifferences();
drawTimeline();
drawOwn();
onLaunch.push(drawMap);
goTo(Math.max(0, launches.findIndex((launch) => launch.name === "residual_layernorm_forward")));
drawStory();
