// Which experts the router chooses, by layer and by adapter: since the server's start, or of late.
//
//   GET /v1/heat (counts since start) -> answers of the last minute -> newest less oldest -> cells

import { request } from "./api.js";
import { CellGrid } from "./cells.js";
import { attribute, byId, text } from "./dom.js";
import { count, plural, short } from "./format.js";
import { Panel, adapterColour, chooser } from "./panels.js";

const ALL = "all adapters";
const LATELY_MS = 60000;
const GAP_MS = 30000; // longer without an answer, as in a hidden tab: the minute begins anew
const panel = new Panel("heat", "This server does not count which experts are used.");
let grid = null;
let answers = []; // [{ timeMs, heat }], the newest last; counts only grow in it

function remember(heat) {
  const timeMs = performance.now();
  const last = answers.at(-1);
  const isOther = last && heat.sampled_steps < last.heat.sampled_steps; // another server process
  if (isOther || timeMs - last?.timeMs > GAP_MS) answers = [];
  answers.push({ timeMs, heat });
  while (answers.length > 2 && answers[1].timeMs <= timeMs - LATELY_MS) answers.shift();
}

function matrixOf(heat, chosen) {
  if (chosen !== ALL) return heat.adapters[chosen];
  const matrices = Object.values(heat.adapters);
  return heat.layers.map((_, row) =>
    Array.from({ length: heat.num_experts }, (__, expert) => matrices.reduce((sum, each) => sum + (each[row]?.[expert] ?? 0), 0)),
  );
}

function less(matrix, before) {
  if (!before) return matrix;
  return matrix.map((row, r) => row.map((value, c) => Math.max(0, value - (before[r]?.[c] ?? 0))));
}

function rowOf(heat, counts, index, most, colour) {
  const layer = heat.layers[index];
  const whole = counts.reduce((sum, value) => sum + value, 0);
  const distinct = heat.distinct_experts_per_step?.mean?.[index];
  return {
    key: layer,
    left: `layer ${layer}`,
    right: Number.isFinite(distinct) ? `${short(distinct)} a step` : "",
    runs: counts.map((value) => ({
      count: 1,
      fill: colour,
      kind: value > 0 ? "warm" : "cold",
      opacity: value > 0 ? 0.08 + 0.92 * Math.sqrt(value / most) : 0,
    })),
    words(expert) {
      const share = whole > 0 ? ((100 * counts[expert]) / whole).toFixed(1) : 0;
      return `layer ${layer}, expert ${expert}: chosen ${count(counts[expert])} times, ${share} % of the layer`;
    },
  };
}

function draw() {
  const { heat } = answers.at(-1);
  const chosen = byId("heat-adapter").value;
  const before = byId("heat-span").value === "lately" ? answers[0].heat : null;
  const matrix = less(matrixOf(heat, chosen), before && matrixOf(before, chosen));
  const most = Math.max(0, ...matrix.flat());
  const colour = chosen === ALL ? "var(--accent)" : adapterColour(chosen);
  byId("heat-scale").style.color = colour;
  text(byId("heat-most"), count(most));
  text(byId("heat-steps"), `${plural(heat.sampled_steps - (before?.sampled_steps ?? 0), "step")} sampled`);
  grid ??= new CellGrid(byId("heat-map"), "Expert heat");
  grid.show(
    matrix.map((counts, index) => rowOf(heat, counts, index, most, colour)),
    `${plural(matrix.length, "MoE layer")} of ${plural(heat.num_experts, "expert")}; point at one, or use the arrow keys`,
  );
}

export const source = {
  name: "heat",
  everyMs: 4000,
  ask: () => request("GET", "/v1/heat"),
  show(heat) {
    panel.shown();
    remember(heat);
    chooser(byId("heat-adapter"), ALL, Object.keys(heat.adapters));
    const none = heat.sampled_steps === 0;
    attribute(byId("heat-map"), "hidden", none);
    if (none) text(byId("heat-steps"), "Nothing counted yet: send a request.");
    else draw();
  },
  fail(error) {
    panel.failed(error);
  },
};

export function setUp() {
  for (const id of ["heat-adapter", "heat-span"]) {
    byId(id).addEventListener("change", () => answers.at(-1)?.heat.sampled_steps && draw());
  }
}
