// Asks the server again and again: one request after the other, every two seconds.
//
//   sources --due?--> ask() --> show(answer) | fail(error) --> due again
//
// A source that fails waits longer each time, one whose route is missing a minute. A server that does
// not answer is asked by one source only, until it does. A late answer may be that of busy ranks: the
// others go on, unless it is late for a source that waits for no rank. Nothing is asked while the page
// is hidden.

const INTERVAL_MS = 2000;
const LONGEST_MS = 30000;
const MISSING_MS = 60000;

function waitAfter(error, failures) {
  if (error.status === 404) return MISSING_MS;
  return Math.max(error.retryAfterMs ?? 0, Math.min(LONGEST_MS, INTERVAL_MS * 2 ** failures));
}

export class Poller {
  // source: { name, ask: async () => answer, show(answer), fail(error), everyMs?, isQuick? }
  // isQuick: the process that serves HTTP answers by itself.
  constructor(sources, onReach) {
    this.sources = sources.map((source) => ({ ...source, dueMs: 0, failures: 0 }));
    this.onReach = onReach; // called with an ApiError, or null when the server answers
    this.isLost = false;
    this.timer = null;
    this.running = null;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  wake() {
    clearTimeout(this.timer);
    if (!document.hidden) this.tick();
  }

  // Ask these sources at once, whatever they waited for; no names: all.
  refresh(...names) {
    for (const source of this.sources) {
      if (names.length === 0 || names.includes(source.name)) {
        source.dueMs = 0;
        source.failures = 0;
        source.isAgain = true;
      }
    }
    this.wake();
  }

  async tick() {
    if (this.running) {
      await this.running;
      return this.tick();
    }
    this.running = this.round();
    await this.running;
    this.running = null;
    clearTimeout(this.timer);
    const nextMs = Math.min(...this.sources.map((source) => source.dueMs)) - performance.now();
    if (!document.hidden) this.timer = setTimeout(() => this.tick(), Math.max(50, nextMs));
  }

  async round() {
    for (const source of this.sources) {
      if (document.hidden) return;
      if (source.dueMs > performance.now()) continue;
      const wasLost = this.isLost;
      await this.once(source);
      if (this.isLost) {
        this.postpone(source.dueMs);
        return;
      }
      if (wasLost) return; // all are due now, in their order
    }
  }

  // What was to be asked at once while it was being asked is asked once more: that answer is of before.
  async once(source) {
    source.isAgain = false;
    await this.answered(source);
    if (source.isAgain) source.dueMs = 0;
  }

  async answered(source) {
    try {
      const answer = await source.ask();
      source.show(answer);
      source.failures = 0;
      source.dueMs = performance.now() + (source.everyMs ?? INTERVAL_MS);
      this.reached(null);
    } catch (error) {
      const wait = waitAfter(error, source.failures);
      source.failures += 1;
      source.dueMs = performance.now() + wait;
      if (error.status !== 0) this.reached(null);
      else if (!error.isLate || source.isQuick) this.reached(error);
      source.fail(error);
    }
  }

  // A server that is back may be another one: everything is asked anew.
  reached(error) {
    if (this.isLost && !error) for (const source of this.sources) source.dueMs = 0;
    this.isLost = error !== null;
    this.onReach(error);
  }

  postpone(dueMs) {
    for (const source of this.sources) source.dueMs = Math.max(source.dueMs, dueMs);
  }
}
