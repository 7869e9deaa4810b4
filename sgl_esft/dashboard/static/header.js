// The line at the top: which model, whether it is ready, how much it does; and the user's key.

import { key, setKey } from "./api.js";
import { attribute, byId, text } from "./dom.js";
import { count, plural, short } from "./format.js";

function chip(state, words, details) {
  attribute(byId("state"), "class", `chip ${state}`);
  text(byId("state"), words);
  text(byId("state-reason"), details);
}

export function showReady(answer) {
  const ranks = answer.ranks ?? [];
  if (/drain/i.test(`${answer.state} ${answer.reason}`)) chip("warn", "draining", answer.reason ?? "");
  else if (answer.ready) chip("good", "ready", ranks.length ? plural(ranks.length, "rank") : "");
  else chip("bad", "not ready", answer.reason ?? "");
}

// Servers without /readyz say only that they answer.
export function readyFailed(error) {
  if (error.status === 0) chip("bad", "no answer", error.message);
  else if (error.status === 404) chip("good", "answers", "");
  else chip("bad", "not ready", error.message);
}

export function showModel(answer) {
  const models = answer.data ?? [];
  const base = models.find((model) => !model.parent) ?? {};
  const name = String(base.id ?? "").split("/").filter(Boolean).at(-1) ?? "";
  text(byId("model"), name);
  attribute(byId("model"), "title", base.id);
  document.title = name ? `${name} · dashboard` : "Dashboard";
}

export function modelFailed(error) {
  if (error.status === 401) text(byId("model"), "a key is needed");
}

export function showDevices(number) {
  text(byId("devices"), count(number));
}

// Rates per second; null = not known.
export function showRates(rates) {
  text(byId("requests-rate"), short(rates.requests));
  text(byId("tokens-rate"), short(rates.tokens));
  text(byId("running"), count(rates.running));
  text(byId("queued"), count(rates.queued));
}

// onChange() after the key was set. When it is forgotten the page begins anew, so that nothing of what
// the key has shown stays in it.
export function keyForm(onChange) {
  const [form, field, problem] = [byId("key-form"), byId("key"), byId("key-problem")];
  const draw = () => {
    const has = key() !== "";
    attribute(field, "placeholder", has ? "a key is set" : "API key");
    attribute(byId("key-forget"), "disabled", !has);
    field.value = "";
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const wrong = setKey(field.value || key());
    text(problem, wrong);
    if (wrong) return;
    draw();
    onChange();
  });
  byId("key-forget").addEventListener("click", () => {
    setKey("");
    location.reload();
  });
  draw();
}
