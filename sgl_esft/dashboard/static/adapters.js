// The table of adapters and what can be done with them.
//
//   GET /v1/adapters -> rows;  buttons -> POST, PATCH, DELETE /v1/adapters/{name} -> the server's words

import { adapterPath, request } from "./api.js";
import { confirmed } from "./dialog.js";
import { attribute, byId, el, keyed, text } from "./dom.js";
import { ago, bytes, count, plural } from "./format.js";
import { Panel, adapterColour, describe } from "./panels.js";

const STATES = {
  on_disk: ["on disk", "quiet"],
  loading: ["loading", "busy"],
  in_host_cache: ["in host cache", "plain"],
  on_device: ["on device", "good"],
  draining: ["draining", "warn"],
  failed: ["failed", "bad"],
};
const LOADED = new Set(["in_host_cache", "on_device"]);
const COLUMNS = ["Adapter", "State", "Size", "Slot", "In use", "Last use", "Actions"];

const panel = new Panel("adapters", "This server has no adapters to manage: it runs without weaving.");
let changed = () => {};

// What the last click led to: said once, for eyes and for screen readers.
function said(words, isProblem) {
  const line = byId("adapters-said");
  text(line, words);
  attribute(line, "class", isProblem ? "said problem" : "said");
}

async function act(words, method, path, body) {
  said(`${words} …`, false);
  try {
    await request(method, path, body);
    said(`${words}: accepted.`, false);
    return true;
  } catch (error) {
    said(`${words}: ${describe(error)}`, true);
    return false;
  } finally {
    changed();
  }
}

async function unload({ name, state, num_references: used }) {
  const details = state === "failed"
    ? "Its error is forgotten. It is tried again when somebody loads it, or its folder changes."
    : used
    ? `${plural(used, "request")} still use it and end first. New requests for it are refused at once.`
    : "New requests for it are refused at once. Its folder stays where it is.";
  if (await confirmed(`Unload ${name}?`, details, "Unload")) {
    await act(`Unload ${name}`, "DELETE", adapterPath(name));
  }
}

const ACTIONS = [
  ["load", (adapter) => act(`Load ${adapter.name}`, "POST", "/v1/adapters", { name: adapter.name })],
  [
    "pin",
    (adapter) =>
      act(`${adapter.pinned ? "Unpin" : "Pin"} ${adapter.name}`, "PATCH", adapterPath(adapter.name), {
        pinned: !adapter.pinned,
      }),
  ],
  ["reload", (adapter) => act(`Reload ${adapter.name}`, "PATCH", adapterPath(adapter.name), { reload: true })],
  ["unload", unload],
];

function allowed(adapter) {
  const loaded = LOADED.has(adapter.state);
  return {
    load: adapter.state === "on_disk" || adapter.state === "failed",
    pin: loaded,
    reload: loaded,
    unload: loaded || adapter.state === "loading" || (adapter.state === "failed" && adapter.on_demand),
  };
}

function makeRow() {
  const part = (name, tag = "span") => el(tag, { "data-part": name });
  const row = el("tr");
  const buttons = ACTIONS.map(([name, run]) =>
    el("button", { type: "button", "data-act": name, onclick: () => run(row.adapter) }, name),
  );
  const cells = [
    [el("i", { class: "swatch", "data-part": "colour" }), part("name", "b"), part("folder", "small")],
    [part("state"), part("pinned"), part("changed"), part("barred"), part("progress", "progress"), part("detail", "small")],
    [part("size"), part("experts", "small")],
    [part("slots"), part("mapped", "small")],
    [part("references")],
    [part("used")],
    [el("div", { class: "buttons" }, buttons)],
  ];
  row.append(...cells.map((children, index) => el("td", { "data-label": COLUMNS[index] }, children)));
  row.parts = Object.fromEntries([...row.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]));
  return row;
}

function slotWords(devices) {
  const slots = [...new Set(devices.map((device) => device.adapter_slot))];
  return slots.length ? slots.join(", ") : "–";
}

function detailWords(adapter) {
  const parts = [];
  if (adapter.load) {
    parts.push(`${adapter.load.replaces ? "replacing: " : ""}${adapter.load.phase} ${Math.round(100 * adapter.load.progress)} %`);
  }
  if (adapter.error) parts.push(`${adapter.error.type}: ${adapter.error.message}`);
  for (const old of adapter.draining_versions ?? []) {
    parts.push(`an old version drains: ${plural(old.num_references, "request")}`);
  }
  return parts.join("; ");
}

function showRow(row, adapter) {
  row.adapter = adapter;
  row.dataset.name = adapter.name;
  row.dataset.state = adapter.state;
  const { parts } = row;
  const devices = adapter.devices ?? [];
  const [stateWords, stateKind] = STATES[adapter.state] ?? [adapter.state, "plain"];
  parts.colour.style.background = devices.length ? adapterColour(adapter.name) : "transparent";
  text(parts.name, adapter.name);
  text(parts.folder, adapter.folder ?? "");
  attribute(parts.folder, "title", adapter.digest ? `digest ${adapter.digest}` : null);
  text(parts.state, stateWords);
  attribute(parts.state, "class", `badge ${stateKind}`);
  text(parts.pinned, adapter.pinned ? "pinned" : "");
  attribute(parts.pinned, "class", adapter.pinned ? "badge pin" : null);
  text(parts.changed, adapter.changed_on_disk ? "changed on disk" : "");
  attribute(parts.changed, "class", adapter.changed_on_disk ? "badge warn" : null);
  const barred = adapter.on_demand === false && !LOADED.has(adapter.state);
  text(parts.barred, barred ? "not on demand" : "");
  attribute(parts.barred, "class", barred ? "badge quiet" : null);
  attribute(parts.progress, "hidden", !adapter.load);
  attribute(parts.progress, "aria-label", `progress of ${adapter.name}`);
  if (adapter.load) parts.progress.value = adapter.load.progress;
  text(parts.detail, detailWords(adapter));
  attribute(parts.detail, "class", adapter.error ? "problem" : null);
  text(parts.size, bytes(adapter.num_bytes));
  const experts = Number.isFinite(adapter.num_experts) ? plural(adapter.num_experts, "expert") : "";
  text(parts.experts, adapter.kind === "lora" ? "LoRA" : experts);
  text(parts.slots, slotWords(devices));
  text(parts.mapped, devices.length ? `${bytes(devices.reduce((sum, { mapped_bytes: mapped }) => sum + mapped, 0))} mapped` : "");
  text(parts.references, count(adapter.num_references));
  const usedMs = adapter.last_used ? Date.parse(adapter.last_used) : null;
  text(parts.used, ago(usedMs));
  attribute(parts.used, "title", adapter.last_used);
  showButtons(row, adapter);
}

function showButtons(row, adapter) {
  const may = allowed(adapter);
  for (const button of row.querySelectorAll("button")) {
    const action = button.dataset.act;
    attribute(button, "disabled", !may[action]);
    const words = action === "pin" && adapter.pinned ? "unpin" : action;
    text(button, words);
    attribute(button, "aria-label", `${words} ${adapter.name}`);
  }
}

function showSummary({ adapters, slots, lora_slots: loraSlots, host }) {
  const parts = [plural(adapters.length, "adapter")];
  if (slots) parts.push(`${slots.used} of ${slots.total} adapter slots taken`);
  if (loraSlots) parts.push(`${loraSlots.used} of ${loraSlots.total} LoRA slots taken`);
  if (host) {
    const budget = host.budget_bytes === null || host.budget_bytes === undefined ? "no limit" : `of ${bytes(host.budget_bytes)}`;
    parts.push(`host cache ${bytes(host.used_bytes)} (${budget})`);
  }
  text(byId("adapters-summary"), parts.join(" · "));
}

export const source = {
  name: "adapters",
  ask: () => request("GET", "/v1/adapters"),
  show(answer) {
    panel.shown();
    showSummary(answer);
    const sorted = [...answer.adapters].sort((a, b) => a.name.localeCompare(b.name));
    keyed(byId("adapter-rows"), sorted, (adapter) => adapter.name, makeRow, showRow);
    attribute(byId("adapters-none"), "hidden", sorted.length > 0);
  },
  fail(error) {
    panel.failed(error);
  },
};

// onChange() after anything was asked for.
export function setUp(onChange) {
  changed = onChange;
  byId("adapter-head").append(...COLUMNS.map((name) => el("th", { scope: "col" }, name)));
  byId("load-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const fields = new FormData(event.target);
    const [name, path] = ["name", "path"].map((field) => fields.get(field).trim());
    const body = { name, pinned: fields.get("pinned") !== null };
    if (path) body.path = path;
    if (await act(`Load ${name}`, "POST", "/v1/adapters", body)) event.target.reset();
  });
}
