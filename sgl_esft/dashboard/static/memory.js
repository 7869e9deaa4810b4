// The expert tensor of every device: a row for each MoE layer, a cell for each run of slots.

import { request } from "./api.js";
import { CellGrid } from "./cells.js";
import { byId, el, keyed, redraw, text } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { showDevices } from "./header.js";
import { BASE_COLOUR, Panel, setSlots, slotColour } from "./panels.js";

const panel = new Panel("memory", "This server has no expert memory of ours: it runs without weaving.");

function makeDevice() {
  const parts = {
    title: el("h3"),
    facts: el("p", { class: "facts" }),
    bar: el("div", { class: "bar" }),
    legend: el("div", { class: "legend" }),
    map: el("div"),
  };
  const node = el("section", { class: "device" }, Object.values(parts));
  node.parts = parts;
  node.grid = new CellGrid(parts.map, "Expert slots");
  return node;
}

function facts(device) {
  const words = [
    `${bytes(device.mapped_bytes)} mapped, ${bytes(device.shared_bytes)} of it on pages that slots share`,
    `F_mem ${device.fragmentation.toFixed(3)}`,
    `with padding ${bytes(device.padded_bytes)}, F_mem ${device.padded_fragmentation.toFixed(3)}`,
  ];
  if (device.pool) words.push(`pages of ${bytes(device.pool.page_bytes)}, ${bytes(device.pool.free_bytes)} free`);
  if (device.kv) words.push(`KV ${count(device.kv.num_tokens)} tokens`);
  if (device.tiers) words.push(tierFacts(device.tiers));
  return words.join(" · ");
}

// Experts that are not all on the device; the map below shows who is now.
function tierFacts(tiers) {
  const share = (part, whole) => `${((100 * part) / Math.max(whole, 1)).toFixed(1)} %`;
  return [
    `tiers: ${tiers.policy}, ${plural(tiers.num_rows, "row")} a layer`,
    `${share(tiers.num_hits, tiers.num_requests)} of experts were there`,
    `${count(tiers.num_loads)} read on demand, ${count(tiers.num_prefetches)} ahead (${share(tiers.num_useful, tiers.num_prefetches)} used)`,
    `${bytes(tiers.read_bytes)} read, stalled ${tiers.stall_s.toFixed(1)} s`,
  ].join(", ");
}

// What the mapped bytes are, as shares of what padding would map.
function drawBar(device) {
  const owners = new Map();
  for (const layer of device.layers) {
    for (const run of layer.runs) {
      owners.set(run.owner, (owners.get(run.owner) ?? 0) + run.count * layer.slot_bytes);
    }
  }
  const whole = Math.max(device.padded_bytes, device.mapped_bytes, 1);
  return [...owners]
    .sort(([a], [b]) => a - b)
    .map(([owner, size]) => {
      const part = el("i", { title: `${bytes(size)}` });
      part.style.inlineSize = `${(100 * size) / whole}%`;
      part.style.background = slotColour(owner);
      return part;
    });
}

function drawLegend(device) {
  const named = Object.entries(device.adapters).sort(([, a], [, b]) => a - b);
  const sizes = (owner) =>
    device.layers.reduce(
      (sum, layer) => sum + layer.runs.filter((run) => run.owner === owner).reduce((n, run) => n + run.count * layer.slot_bytes, 0),
      0,
    );
  const entries = [["base", -1, BASE_COLOUR], ...named.map(([name, slot]) => [name, slot, slotColour(slot)])];
  const swatches = entries.map(([name, slot, colour]) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = colour;
    return el("span", { class: "entry" }, swatch, `${name} ${bytes(sizes(slot))}`);
  });
  return [...swatches, el("span", { class: "entry" }, el("i", { class: "swatch hollow" }), "no memory of its own")];
}

// The layer's runs, which ascend, and what is between them.
function runsOf(layer) {
  const runs = [];
  let next = 0;
  const hollowUntil = (slot) => slot > next && runs.push({ count: slot - next, kind: "hollow" });
  for (const { first, count: length, owner } of layer.runs) {
    hollowUntil(first);
    runs.push({ count: length, fill: slotColour(owner), kind: owner < 0 ? "of-base" : "of-adapter" });
    next = first + length;
  }
  hollowUntil(layer.num_slots);
  return runs;
}

function rowOf(layer, names) {
  const words = (slot) => {
    const run = layer.runs.find(({ first, count: length }) => first <= slot && slot < first + length);
    const whose = run && (names.get(run.owner) ?? `adapter slot ${run.owner}`);
    const what = run ? `${whose}, ${bytes(layer.slot_bytes)}` : "no memory of its own";
    return `layer ${layer.layer_id}, slot ${slot}: ${what}`;
  };
  const [left, right] = [`layer ${layer.layer_id}`, bytes(layer.mapped_bytes)];
  return { key: layer.layer_id, left, right, runs: runsOf(layer), words };
}

function showDevice(node, device) {
  const { title, bar, legend } = node.parts;
  text(title, `rank ${device.rank} · ${device.device} · ${device.expert_memory}`);
  text(node.parts.facts, facts(device));
  redraw(bar, [device.layers, device.padded_bytes], () => drawBar(device));
  redraw(legend, [device.layers, device.adapters], () => drawLegend(device));
  const signature = JSON.stringify([device.layers, device.adapters]);
  if (node.signature === signature) return;
  node.signature = signature;
  const names = new Map([[-1, "base"], ...Object.entries(device.adapters).map(([name, slot]) => [slot, name])]);
  const slots = device.layers[0]?.num_slots ?? 0;
  node.grid.show(
    device.layers.map((layer) => rowOf(layer, names)),
    `${plural(device.layers.length, "MoE layer")} of ${plural(slots, "slot")}; point at one, or use the arrow keys`,
  );
}

export const source = {
  name: "memory",
  ask: () => request("GET", "/v1/memory"),
  show({ devices }) {
    panel.shown();
    setSlots(devices[0]?.adapters ?? {});
    showDevices(devices.length);
    keyed(byId("memory-devices"), devices, (device) => device.rank, makeDevice, showDevice);
  },
  fail(error) {
    panel.failed(error);
  },
};
