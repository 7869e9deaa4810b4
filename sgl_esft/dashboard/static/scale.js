// The scale control: a dry run says what would happen, Scale asks once more and starts it.

import { request } from "./api.js";
import { confirmed } from "./dialog.js";
import { attribute, byId, el, text } from "./dom.js";
import { describe } from "./panels.js";
import { drawPlan } from "./timeline.js";

// "0, 2-3" -> [0, 2, 3]; null where it is no list of devices.
export function devicesOf(words) {
  const found = [];
  for (const part of words.split(",").map((each) => each.trim()).filter(Boolean)) {
    const match = /^(\d{1,4})(?:-(\d{1,4}))?$/.exec(part);
    if (!match) return null;
    const [first, last] = [Number(match[1]), Number(match[2] ?? match[1])];
    for (let device = first; device <= last; device += 1) found.push(device);
  }
  return found;
}

function bodyOf(form) {
  const fields = new FormData(form);
  const body = { dp_size: Number(fields.get("dp_size")) };
  for (const name of ["device_ids", "leave"]) {
    const devices = devicesOf(fields.get(name));
    if (devices === null) throw new Error(`${fields.get(name)}: write devices as 0, 2-3`);
    if (devices.length) body[name] = devices;
  }
  if (fields.get("drain") !== null) body.drain = true;
  return body;
}

function said(words, isProblem) {
  attribute(byId("scale-said"), "class", isProblem ? "said problem" : "said");
  text(byId("scale-said"), words);
}

async function dryRun(body) {
  said("Planning …", false);
  byId("scale-plan").replaceChildren(); // an error must not stand beside the plan of something else
  byId("scale-plan").replaceChildren(...drawPlan(await request("POST", "/v1/scale", { ...body, dry_run: true })).flat());
  said("", false);
}

async function scale(body) {
  const question = `Scale to ${body.dp_size} ${body.dp_size === 1 ? "device" : "devices"}?`;
  const details = "Requests go on. A dry run shows what moves.";
  if (!(await confirmed(question, details, "Scale"))) return;
  const operation = await request("POST", "/v1/scale", body);
  byId("scale-plan").replaceChildren(el("p", {}, `Started ${operation.id}: see the timeline.`));
  said("", false);
}

// onChange() after anything was asked for.
export function setUp(onChange) {
  const form = byId("scale-form");
  const run = async (what) => {
    if (!form.reportValidity()) return;
    try {
      await what(bodyOf(form));
    } catch (error) {
      said(describe(error), true);
    }
    onChange();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(dryRun);
  });
  byId("scale-start").addEventListener("click", () => run(scale));
}
