// Throughput and latency over the last ten minutes, from deltas of what /metrics counts. Where there
// are metrics by adapter they are used, otherwise SGLang's own of all requests.

import { requestText } from "./api.js";
import { byId } from "./dom.js";
import { seconds, short } from "./format.js";
import { showRates } from "./header.js";
import { LineChart } from "./lines.js";
import { History, buckets, parse, total } from "./metrics.js";
import { Panel, chooser } from "./panels.js";

const ALL = "all requests";
const OURS = {
  requests: "sgl_esft:requests_total",
  prompt: "sgl_esft:prompt_tokens_total",
  generated: "sgl_esft:generation_tokens_total",
  first: "sgl_esft:time_to_first_token_seconds_bucket",
  between: "sgl_esft:inter_token_latency_seconds_bucket",
};
const SGLANGS = {
  requests: "sglang:num_requests_total",
  prompt: "sglang:prompt_tokens_total",
  generated: "sglang:generation_tokens_total",
  first: "sglang:time_to_first_token_seconds_bucket",
  between: "sglang:inter_token_latency_seconds_bucket",
};
const GAUGES = { running: "sglang:num_running_reqs", queued: "sglang:num_queue_reqs" };
const NOBODY = "(none)"; // of requests that ended before they had an adapter
const FINE = new Set(["ok", "cancelled"]); // outcomes that are no failure
const WANTED = new Set([OURS, SGLANGS, GAUGES].flatMap((names) => Object.values(names)));

const panel = new Panel("traffic", "Metrics are off: start the server with --enable-metrics.");
const history = new History();
let charts = null;
let adapters = [];
let last = null;

function makeCharts() {
  const host = byId("charts");
  const chart = (title, one, two, print) =>
    new LineChart(host, title, [{ name: one, colour: "one" }, { name: two, colour: "two" }], print);
  return {
    requests: chart("Requests / s", "ended", "refused, failed", short),
    tokens: chart("Tokens / s", "generated", "prompt", short),
    first: chart("Time to first token", "p50", "p95", seconds),
    between: chart("Time between tokens", "p50", "p95", seconds),
  };
}

const of = (metric, adapter) => (adapter === ALL ? metric : `${metric}|${adapter}`);

// One moment: every counter and histogram as a whole, ours by adapter too.
function sampleOf(found) {
  const sample = { time: Date.now() / 1000, counters: {}, histograms: {} };
  const add = (metric, adapter, samples) => {
    if (metric.endsWith("_bucket")) sample.histograms[of(metric, adapter)] = buckets(samples);
    else sample.counters[of(metric, adapter)] = total(samples);
    if (metric !== OURS.requests) return;
    const failed = total(samples, (labels) => !FINE.has(labels.outcome));
    sample.counters[of("failed", adapter)] = failed ?? (found.has(metric) ? 0 : null);
  };
  for (const metric of Object.values(SGLANGS)) add(metric, ALL, found.get(metric));
  for (const metric of Object.values(OURS)) {
    const samples = found.get(metric);
    add(metric, ALL, samples);
    const ofEach = Map.groupBy(samples ?? [], ({ labels }) => labels.adapter);
    for (const adapter of adapters) add(metric, adapter, ofEach.get(adapter));
  }
  return sample;
}

function adaptersIn(found) {
  const names = [OURS.requests, OURS.generated].flatMap((metric) => found.get(metric) ?? []);
  return [...new Set(names.map(({ labels }) => labels.adapter))].filter((name) => name && name !== NOBODY).sort();
}

function draw() {
  charts ??= makeCharts();
  const { found, sample } = last;
  const chosen = byId("traffic-adapter").value;
  const names = found.has(OURS.requests) ? OURS : SGLANGS;
  const rate = (kind, adapter = chosen) => history.rate(of(names[kind], adapter));
  const quantiles = (kind) => [0.5, 0.95].map((q) => history.quantile(of(names[kind], chosen), q));
  charts.requests.show([rate("requests"), history.rate(of("failed", chosen))], sample.time);
  charts.tokens.show([rate("generated"), rate("prompt")], sample.time);
  charts.first.show(quantiles("first"), sample.time);
  charts.between.show(quantiles("between"), sample.time);
  const now = (kind) => rate(kind, ALL).at(-1)?.[1] ?? null;
  const gauge = (name) => total(found.get(name));
  showRates({
    requests: now("requests"),
    tokens: now("generated"),
    running: gauge(GAUGES.running),
    queued: gauge(GAUGES.queued),
  });
}

export const source = {
  name: "metrics",
  ask: () => requestText("GET", "/metrics"),
  show(text) {
    const found = parse(text, (name) => WANTED.has(name));
    adapters = adaptersIn(found);
    const sample = sampleOf(found);
    history.add(sample);
    last = { found, sample };
    chooser(byId("traffic-adapter"), ALL, adapters);
    panel.shown();
    draw();
  },
  fail(error) {
    panel.failed(error);
    showRates({ requests: null, tokens: null, running: null, queued: null });
  },
};

export function setUp() {
  byId("traffic-adapter").addEventListener("change", () => last && draw());
}
