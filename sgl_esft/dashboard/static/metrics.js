// Prometheus text in, rates and quantiles over time out. Nothing here knows the page.

const LINE = /^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n", "\\": "\\", '"': '"' };
const HISTORY_S = 600;
const GAP_S = 30; // longer without a sample: no line between the two
const MIN_WINDOW_S = 3.5;

function labelsOf(words) {
  const labels = {};
  for (const [, name, value] of words.matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (_, letter) => ESCAPED[letter] ?? letter);
  }
  return labels;
}

// Map: metric name -> [{ labels, value }], of the names that `wants` accepts.
export function parse(text, wants) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const match = LINE.exec(line);
    if (!match || !wants(match[1])) continue;
    const value = Number(match[3] === "+Inf" ? Infinity : match[3]);
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels: labelsOf(match[2] ?? ""), value });
  }
  return found;
}

// Sum over everything that `matches`; null where there is no such metric.
export function total(samples, matches = () => true) {
  const chosen = (samples ?? []).filter(({ labels }) => matches(labels));
  return chosen.length ? chosen.reduce((sum, { value }) => sum + value, 0) : null;
}

// Upper bound -> cumulative count, summed over all other labels: a Map in ascending order.
export function buckets(samples) {
  const sums = new Map();
  for (const { labels, value } of samples ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return new Map([...sums].sort(([a], [b]) => a - b));
}

// What was counted between two cumulative histograms: [[upper bound, count], ...].
function between(before, after) {
  let below = 0;
  return [...after].map(([bound, sum]) => {
    const upTo = sum - (before?.get(bound) ?? 0);
    const own = upTo - below;
    below = upTo;
    return [bound, own];
  });
}

// The q-quantile, as Prometheus estimates it: even within a bucket; null without observations.
export function quantile(q, before, after) {
  const counts = between(before, after);
  const all = counts.reduce((sum, [, count]) => sum + count, 0);
  if (!(all > 0)) return null;
  let rest = q * all;
  let lower = 0;
  for (const [bound, count] of counts) {
    if (count > 0 && rest <= count) return bound === Infinity ? lower : lower + (bound - lower) * (rest / count);
    rest -= count;
    lower = bound === Infinity ? lower : bound;
  }
  return lower;
}

// Most adapters rest most of the time: a histogram that counted nothing new is kept once.
function shareUnchanged(before, now) {
  for (const [name, counts] of Object.entries(now)) {
    const old = before[name];
    if (old && old.size === counts.size && old.get(Infinity) === counts.get(Infinity)) now[name] = old;
  }
}

// Samples of the last ten minutes. A counter that falls means another server process: begin again.
export class History {
  constructor() {
    this.samples = []; // { time: s, counters: { name: number|null }, histograms: { name: Map } }
  }

  add(sample) {
    const last = this.samples.at(-1);
    if (last && Object.keys(sample.counters).some((name) => sample.counters[name] < last.counters[name])) {
      this.samples = [];
    }
    if (last) shareUnchanged(last.histograms, sample.histograms);
    this.samples.push(sample);
    while (this.samples[0].time < sample.time - HISTORY_S) this.samples.shift();
  }

  // [[time, value|null], ...]: `value(before, after)` of each sample and one about `windowS` before.
  line(windowS, value) {
    const points = [];
    let first = 0;
    for (let i = 1; i < this.samples.length; i += 1) {
      const after = this.samples[i];
      if (after.time - this.samples[i - 1].time > GAP_S) {
        first = i;
        points.push([after.time, null]);
        continue;
      }
      while (first < i - 1 && this.samples[first + 1].time <= after.time - windowS) first += 1;
      const before = this.samples[first];
      points.push([after.time, after.time - before.time < MIN_WINDOW_S ? null : value(before, after)]);
    }
    return points;
  }

  rate(name, windowS = 10) {
    return this.line(windowS, (before, after) => {
      const [from, to] = [before.counters[name], after.counters[name]];
      if (to === null || to === undefined) return null;
      return (to - (from ?? 0)) / (after.time - before.time);
    });
  }

  quantile(name, q, windowS = 20) {
    return this.line(windowS, (before, after) => {
      const to = after.histograms[name];
      return to?.size ? quantile(q, before.histograms[name], to) : null;
    });
  }
}
