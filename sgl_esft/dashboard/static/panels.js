// What all panels share: the line that says why there is nothing to see, and colours.

import { byId, el, keyed, text } from "./dom.js";

export const BASE_COLOUR = "var(--base)";

// The hues of sgl-esft's memory picture: neighbouring adapter slots lie far apart (golden ratio).
export function slotColour(slot) {
  if (!Number.isInteger(slot)) return "var(--accent)";
  if (slot < 0) return BASE_COLOUR;
  return `hsl(${Math.round(((0.58 + slot * 0.618034) % 1) * 360)} 62% 54%)`;
}

// The colour of each adapter that is on a device: that of its adapter slot there.
const slots = new Map();

export function setSlots(adapters) {
  slots.clear();
  for (const [name, slot] of Object.entries(adapters)) slots.set(name, slot);
}

export function adapterColour(name) {
  if (name === "base") return BASE_COLOUR;
  return slotColour(slots.get(name));
}

// The options of a select: `first`, then the names, the base before the others. A choice stays.
export function chooser(select, first, names) {
  const sorted = [...names].sort((a, b) => (b === "base") - (a === "base") || a.localeCompare(b));
  const chosen = select.value;
  const make = (name) => el("option", { value: name }, name);
  keyed(select, [first, ...sorted], (name) => name, make, () => {});
  select.value = sorted.includes(chosen) ? chosen : first;
}

// In words, what the user can do about it.
export function explain(error, missing) {
  const isNoRoute = error.status === 404 && ["", "UnknownRouteError"].includes(error.type);
  if (isNoRoute) return missing;
  if (error.status === 401) return "This server wants a key: type yours at the top.";
  if (error.status === 403) return `${sentence(error.message)} Type an admin key at the top.`;
  if (error.status === 0) return `${sentence(error.message)} Trying again.`;
  return sentence(describe(error));
}

export function describe(error) {
  return error.type ? `${error.type}: ${error.message}` : error.message;
}

function sentence(words) {
  const first = words.charAt(0).toUpperCase() + words.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

export class Panel {
  // `missing`: what to say when the server has no such route. `hides`: then there is no panel at all.
  constructor(id, missing, hides = false) {
    this.root = byId(id);
    this.body = this.root.querySelector(".body");
    this.notice = this.root.querySelector(".notice");
    this.missing = missing;
    this.hides = hides;
  }

  shown() {
    this.root.hidden = false;
    this.body.hidden = false;
    this.root.dataset.state = "live";
    text(this.notice, "");
  }

  // Data that was shown stays, with the reason above it, unless the server refuses it now.
  failed(error) {
    const refused = error.status >= 400 && error.status < 500 && error.status !== 429;
    const stays = !refused && ["live", "stale"].includes(this.root.dataset.state);
    this.root.hidden = this.hides && error.status === 404;
    this.body.hidden = !stays;
    this.root.dataset.state = stays ? "stale" : "none";
    text(this.notice, explain(error, this.missing));
  }
}
