// The page of a student's launch: answers, races, who touched what; play.js plays it.
"use strict";

const MOST_ROWS = 16, MOST_COLUMNS = 32;  // of an array that are drawn

// A window of an output around its first wrong number.
function answerCard({name, right, says, wrong, truth}) {
  const tensor = tensors.find((t) => t.name === name), bad = new Set(wrong);
  const values = valuesAt(tensor, launches.length), [first = 0] = wrong;
  const columns = tensor.shape[tensor.shape.length - 1] || 1, rows = tensor.words / columns;
  const window_ = (size, at) => range(Math.min(8, size)).map(
    (i) => i + Math.max(0, Math.min(size - 8, at - 2)));
  const across = window_(columns, first % columns), down = window_(rows, Math.floor(first / columns));
  const cell = (i) => bad.has(i)
    ? {class: "wrong", text: `✗ ${shown(values[i])}, not ${shown(truth[i])}`} : shown(values[i]);
  return h("article", {class: "card"}, h("h3", {}, `${name}: ${right ? "✓" : "✗"} ${says}`),
    h("p", {}, wrong.length ? `${wrong.length} of ${tensor.words} numbers are wrong (✗).` : ""),
    tableOf(`${name}, in part`, ["row", ...across.map(String)], down.map((r) =>
      [`${r}`, ...across.map((c) => cell(r * columns + c))])));
}

// Time goes down; each thread has a lane, and both meet at the element between them.
function raceOf({what, why, barrier, values, sides}) {
  const [left, right] = sides.map(({does, line, code}) =>
    h("div", {}, `${does}, line ${line}`, h("br"), h("code", {}, code)));
  const [to, from] = sides.map(({does}, i) => does.startsWith("reads") === (i === 0) ? "←" : "→");
  const [before, between, behind] = values.map((value) => value === null ? "?" : value);
  return [tableOf(`A race on ${what}. Time goes down; on a GPU the two may change places.`,
    ["time", sides[0].who, what, sides[1].who], [["before", "", before, ""], ["first", left, to, ""],
      ["between", "", between, ""], ["then", "", from, right], ["behind both", "", behind, ""]], "race"),
  h("p", {}, barrier ? `The last barrier before is in line ${barrier}. ` : "", `${why}.`)];
}

function drawWho(requests) {
  const launch = launches[0], choices = launch.arguments.filter(isArray);
  const grid = h("div", {}), list = h("div", {"aria-live": "polite"});
  const draw = (argument) => {
    const space = launch.arguments.indexOf(argument), touches = new Map(), view = viewOf(argument);
    requests.forEach((request, order) => {
      if (request.kind >= BARRIER || request.space !== space) return;
      for (const [word, lanes] of wantedBy(request)) {
        touches.set(word, [...(touches.get(word) || []), ...lanes.map((lane) => ({order, request,
          who: [request.block, 32 * request.warp + lane]}))]);
      }
    });
    const tell = (r, c, own) => list.replaceChildren(
      h("h3", {}, `${argument.name}, row ${r}, column ${c}: touched ${own.length} times`),
      h("ol", {}, ...own.slice(0, 40).map(({order, request, who: [block, thread]}) => h("li", {},
        `block ${block}, thread ${thread} `, operand(
          `${KINDS[request.kind]}s it in line ${request.line}`, () => show(order))))));
    const cell = (r, c) => {
      const own = touches.get(view.at(r, c) - argument.start);
      return own ? {class: ["forward", "loss", "update", "backward"][own[0].request.warp % 4],
                    text: button(own[0].who.join(":"), () => tell(r, c, own))} : "·";
    };
    const rows = Math.min(MOST_ROWS, view.rows), columns = Math.min(MOST_COLUMNS, view.columns);
    const part = rows < view.rows || columns < view.columns ? ", its first part" : "";
    grid.replaceChildren(tableOf(`block:thread for each number of ${argument.name} ` +
      `(${argument.shape.join(",")})${part}; a colour for each warp`, ["row", ...range(columns)],
      range(rows).map((r) => [`${r}`, ...range(columns).map((c) => cell(r, c))]), "memory"));
    list.replaceChildren();
  };
  const first = choices.find((argument) => argument.written) || choices[0];
  $("who").replaceChildren(select("array", choices.map(({name}) => [name, name]), first.name,
    (name) => draw(argumentOf(launch, name))), grid, list);
  draw(first);
}

$("title").textContent = `${page.kernel}, launched once`;
$("lead").textContent = `${page.file} at ${page.shape}: ${countOf(launches[0].grid)} blocks of ` +
  `${launches[0].block[0]} threads. It ran on a CPU, thread by thread, and every access was noted.`;
$("answers").replaceChildren(...(page.answers.length ? page.answers.map(answerCard)
  : ["This launch writes no output that could be compared."]));
$("race").replaceChildren(...(page.race ? raceOf(page.race)
  : ["No race: no two threads touched one place without a barrier between them."]));
requestsOf(launches[0].trace).then(drawWho);
drawPlay();
document.querySelector("main").hidden = false;  // all at once: nothing jumps
