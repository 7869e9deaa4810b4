// An elastic server's devices: which experts live where, how much KV each has, and the instances.

import { request } from "./api.js";
import { CellGrid } from "./cells.js";
import { byId, el, keyed, text } from "./dom.js";
import { ago, bytes, count, plural, ranges } from "./format.js";
import { showDevices } from "./header.js";
import { Panel } from "./panels.js";

const panel = new Panel("devices-panel", "", true);
const STATES = { active: "good", parked: "quiet", failed: "bad", stopped: "bad", starting: "busy", draining: "warn", frozen: "warn" };
let grid = null;

function rowOf(device, rank, { homes, kv_tokens: kvTokens }) {
  const own = homes.filter((home) => home === device).length;
  return {
    key: device,
    left: `device ${device}`,
    right: `${plural(own, "expert")}, ${count(kvTokens[rank])} KV tokens`,
    runs: homes.map((home) => ({
      count: 1,
      fill: "var(--accent)",
      kind: home === device ? "home" : "away",
      opacity: home === device ? 1 : 0,
    })),
    words: (expert) => `expert ${expert} lives on device ${homes[expert]}, in every layer`,
  };
}

function showInstance(node, instance) {
  const [name, state, devices, since] = node.children;
  text(name, instance.instance_id);
  text(state.firstChild, instance.state);
  state.firstChild.className = `badge ${STATES[instance.state] ?? "plain"}`;
  text(devices, ranges(instance.device_ids));
  text(since, instance.since_s ? ago(instance.since_s * 1000) : "");
}

function makeInstance() {
  return el("tr", {}, el("td"), el("td", {}, el("span")), el("td"), el("td"));
}

// A page that several processes have is in the RSS of each, and shared out in their PSS.
function showSpares(spares) {
  const sum = (field) => spares.reduce((total, each) => total + each[field], 0);
  const node = byId("spares");
  node.hidden = spares.length === 0;
  text(node, `${plural(spares.length, "spare")}: PSS ${bytes(sum("pss_bytes"))}, RSS ${bytes(sum("rss_bytes"))}`);
}

export const source = {
  name: "instances",
  ask: () => request("GET", "/v1/instances"),
  show({ serving, instances, spares }) {
    panel.shown();
    const { placement } = serving;
    showDevices(placement.device_ids.length);
    grid ??= new CellGrid(byId("placement"), "Experts of each device");
    grid.show(
      placement.device_ids.map((device, rank) => rowOf(device, rank, placement)),
      `${plural(placement.homes.length, "expert")} on ${plural(placement.device_ids.length, "device")}, served by ${serving.instance_id}`,
    );
    keyed(byId("instance-rows"), instances, (each) => each.instance_id, makeInstance, showInstance);
    showSpares(spares);
  },
  fail(error) {
    panel.failed(error);
  },
};
