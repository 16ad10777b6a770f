// The page of a student's launch: answers, races, who touched what; data.js and walk.js play it.
"use strict";

const MOST_ROWS = 16, MOST_COLUMNS = 32;  // of an array that are drawn

function drawAnswers() {
  $("answers").replaceChildren(...page.answers.map((answer) => {
    const tensor = tensors.find((t) => t.name === answer.name);
    const values = valuesAt(tensor, launches.length), wrong = new Set(answer.wrong);
    const columns = tensor.shape[tensor.shape.length - 1] || 1, rows = tensor.words / columns;
    const from = answer.wrong.length ? Math.max(0, Math.floor(answer.wrong[0] / columns) - 2) : 0;
    const shownRows = [...Array(Math.min(8, rows - from)).keys()].map((r) => from + r);
    const first = answer.wrong.length ? Math.max(0, Math.min(columns - 8, answer.wrong[0] % columns - 3)) : 0;
    const shownColumns = [...Array(Math.min(8, columns - first)).keys()].map((c) => first + c);
    return h("div", {class: "card", style: "margin-bottom:1rem"},
      h("h3", {style: "margin-top:0"}, `${answer.name}: ${answer.right ? "✓" : "✗"} ${answer.says}`),
      h("p", {}, answer.wrong.length ? `${answer.wrong.length} of ${tensor.words} numbers are wrong (✗).` : ""),
      h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": `${answer.name} beside its truth`},
        h("table", {class: "plain mono"}, h("thead", {}, h("tr", {}, h("th", {scope: "col"}, "row"),
          ...shownColumns.map((c) => h("th", {scope: "col"}, `${c}`)))),
        h("tbody", {}, ...shownRows.map((r) => h("tr", {}, h("th", {scope: "row"}, `${r}`),
          ...shownColumns.map((c) => {
            const i = r * columns + c;
            return h("td", {class: wrong.has(i) ? "wrong" : null}, wrong.has(i)
              ? `✗ ${shown(values[i])}, not ${shown(answer.truth[i])}` : `${shown(values[i])}`);
          })))))));
  }), page.answers.length ? "" : h("p", {}, "This launch writes no output that could be compared."));
  if (!page.race) {
    $("race").replaceChildren(h("p", {}, "No race: no two threads touched one place without a barrier between them."));
    return;
  }
  const lane = (side) => h("div", {class: "card"}, h("h4", {style: "margin:0"}, side.says),
                              sourceOf(launches[0], side.line, 2));
  $("race").replaceChildren(h("h3", {}, `A race on ${page.race.what}`),
    h("div", {class: "pair race"}, ...page.race.sides.map(lane)),
    h("p", {class: "barrier"}, `${page.race.why}.`));
}

function threadOf({request, lane}) {
  return {block: request.block, thread: 32 * request.warp + lane};
}

async function drawWho() {
  const launch = launches[state.launch];
  const requests = await requestsOf(launch.trace);
  const choices = launch.arguments.filter(isArray);
  const select = h("select", {"aria-label": "array", onchange: () => draw()},
    ...choices.map((argument, i) => h("option", {value: i, selected: isOutput(launch, argument)}, argument.name)));
  const grid = h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "who touched each number"});
  const list = h("div", {"aria-live": "polite"});
  const draw = () => {
    const argument = choices[select.value], space = launch.arguments.indexOf(argument);
    const touches = new Map();
    requests.forEach((request, order) => {
      if (request.kind >= BARRIER || request.space !== space) return;
      request.at.forEach((word, lane) => {
        for (let i = 0; word !== null && i < request.bytes / 4; i++) {
          if (!touches.has(word + i)) touches.set(word + i, []);
          touches.get(word + i).push({request, lane, order});
        }
      });
    });
    const view = viewOf(argument);
    const cell = (r, c) => {
      const word = view.at(r, c) - argument.start, own = touches.get(word) || [];
      if (!own.length) return h("td", {class: "none"}, "·");
      const who = threadOf(own[0]);
      return h("td", {class: `thread warp${own[0].request.warp % 4}`},
        h("button", {type: "button", onclick: () => tell(r, c, own)}, `${who.block}:${who.thread}`));
    };
    const tell = (r, c, own) => list.replaceChildren(
      h("h3", {}, `${argument.name}, row ${r}, column ${c}: touched ${own.length} times`),
      h("ol", {}, ...own.slice(0, 40).map((touch) => {
        const {block, thread} = threadOf(touch);
        return h("li", {}, `block ${block}, thread ${thread} `, h("button", {type: "button", class: "operand",
          onclick: () => show(touch.order)}, `${KINDS[touch.request.kind]}s it in line ${touch.request.line}`));
      })));
    const rows = Math.min(MOST_ROWS, view.rows), columns = Math.min(MOST_COLUMNS, view.columns);
    grid.replaceChildren(h("table", {class: "memory who"},
      h("caption", {class: "none"}, `block:thread for each number of ${argument.name} ` +
        `(${argument.shape.join(",")})` + (rows < view.rows || columns < view.columns ? ", its first part" : "")),
      h("tbody", {}, ...[...Array(rows).keys()].map((r) => h("tr", {}, h("th", {scope: "row"}, `${r}`),
        ...[...Array(columns).keys()].map((c) => cell(r, c)))))));
    list.replaceChildren();
  };
  $("who").replaceChildren(h("div", {class: "bar"}, select), h("div", {class: "card"}, grid, list));
  draw();
}

$("title").textContent = `${page.kernel}, launched once`;
$("lead").textContent = `${page.file} at ${page.shape}: ${countOf(launches[0].grid)} blocks of ` +
  `${launches[0].block[0]} threads. It ran on a CPU, thread by thread, and every access was noted.`;
drawAnswers();
drawWho();
drawPlay();
