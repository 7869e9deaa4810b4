// The last scale operations: phases as a bar, steps as a table. Also draws the plan of a dry run.

import { request } from "./api.js";
import { byId, el, keyed, redraw, text } from "./dom.js";
import { bytes, clock, count, plural, ranges, seconds } from "./format.js";
import { Panel, describe } from "./panels.js";

const panel = new Panel("timeline-panel", "", true);
const STATES = { succeeded: "good", rolled_back: "warn", degraded: "bad", running: "busy", pending: "busy" };

function table(head, rows) {
  return el(
    "div",
    { class: "scrolls" },
    el(
      "table",
      { class: "small" },
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, index) => el("td", { "data-label": head[index] }, cell))))),
    ),
  );
}

const some = (number, print) => (number > 0 ? print(number) : "");
const where = (step) => (step.source_id >= 0 ? `${step.source_id} → ${step.device_id}` : `${step.device_id}`);

function stepRows(steps) {
  return steps.map((step) => [
    step.kind.replaceAll("_", " "),
    where({ source_id: -1, ...step }),
    some(step.num_experts ?? step.expert_ids?.length ?? 0, count),
    some(step.num_tokens ?? 0, count),
    some(step.num_bytes ?? 0, bytes),
  ]);
}

function drawSteps(operation) {
  const rows = stepRows(operation.steps).map((cells, index) => {
    const { state, seconds: spent } = operation.steps[index];
    return [...cells, state, some(spent, seconds)];
  });
  return table(["Step", "Device", "Experts", "KV tokens", "Bytes", "State", "Time"], rows);
}

function drawPhases(operation) {
  const whole = operation.phases.reduce((sum, phase) => sum + Math.max(0, phase.seconds), 0) || 1;
  return operation.phases.map((phase) => {
    const spent = phase.seconds < 0 ? "running" : seconds(phase.seconds);
    const part = el("i", { class: `phase ${phase.name}`, title: `${phase.name}: ${spent}` }, el("span", {}, `${phase.name} ${spent}`));
    part.style.flexGrow = phase.seconds < 0 ? 0.3 : Math.max(0.02, phase.seconds / whole);
    return part;
  });
}

function facts(operation) {
  const took = operation.finished_s ? operation.finished_s - operation.created_s : null;
  const words = [operation.finished_s ? `took ${seconds(took)}` : `now: ${operation.phase}`];
  if (operation.plan?.copied_bytes) words.push(`${bytes(operation.plan.copied_bytes)} copied`);
  if (operation.plan?.experts?.moved) words.push(`${plural(operation.plan.experts.moved, "expert")} moved`);
  words.push(`requests held for ${seconds(operation.gap_s)}`);
  return words.join(" · ");
}

function sizes({ plan, request: asked }) {
  const of = (placement) => placement?.device_ids?.length;
  return plan?.old ? `${of(plan.old)} → ${of(plan.new)}` : `→ ${asked.dp_size}`;
}

function makeOperation() {
  const parts = {
    when: el("time"),
    sizes: el("b"),
    state: el("span"),
    facts: el("span", { class: "facts" }),
  };
  const bar = el("div", { class: "phases" });
  const error = el("p", { class: "problem" });
  const steps = el("div");
  const summary = el("summary", {}, "steps");
  const node = el("li", {}, el("div", { class: "line" }, Object.values(parts)), bar, error, el("details", {}, summary, steps));
  node.parts = { ...parts, bar, error, steps, summary };
  return node;
}

function showOperation(node, operation) {
  const { parts } = node;
  node.dataset.state = operation.state;
  text(parts.when, clock(operation.created_s));
  text(parts.sizes, sizes(operation));
  text(parts.state, operation.state.replaceAll("_", " "));
  parts.state.className = `badge ${STATES[operation.state] ?? "plain"}`;
  text(parts.facts, facts(operation));
  text(parts.error, operation.error ? describe(operation.error) : "");
  text(parts.summary, `${plural(operation.steps.length, "step")}, ${operation.id}`);
  redraw(parts.bar, operation.phases, () => drawPhases(operation));
  redraw(parts.steps, operation.steps, () => drawSteps(operation));
}

// What a dry run says: each device before and after, then the steps.
export function drawPlan(plan) {
  const devices = plan.devices.map((device) => [
    count(device.device_id),
    `${device.experts_kept}`,
    `+${device.experts_in} −${device.experts_out}`,
    `${count(device.kv_tokens_before)} → ${count(device.kv_tokens)}`,
    bytes(device.peak_bytes),
  ]);
  const words = `Devices ${ranges(plan.old.device_ids)} → ${ranges(plan.new.device_ids)}: ${plural(plan.experts.moved, "expert")} would move, ${bytes(plan.copied_bytes)} would be copied. Nothing was done.`;
  return [
    el("p", {}, words),
    table(["Device", "Experts kept", "In, out", "KV tokens", "Peak memory"], devices),
    table(["Step", "Device", "Experts", "KV tokens", "Bytes"], stepRows([...plan.before, ...plan.after])),
  ];
}

export const source = {
  name: "scale",
  ask: () => request("GET", "/v1/scale?limit=20"),
  show({ operations }) {
    panel.shown();
    text(byId("timeline-none"), operations.length ? "" : "No scale so far.");
    keyed(byId("operations"), operations, (operation) => operation.id, makeOperation, showOperation);
  },
  fail(error) {
    panel.failed(error);
  },
};
