// The page's parts put together: what is asked, in which order, and who shows it.

import * as adapters from "./adapters.js";
import { ApiError, request, requestState } from "./api.js";
import * as devices from "./devices.js";
import { attribute, byId, text } from "./dom.js";
import * as header from "./header.js";
import * as heat from "./heat.js";
import * as memory from "./memory.js";
import { Poller } from "./poll.js";
import * as scale from "./scale.js";
import * as timeline from "./timeline.js";
import * as traffic from "./traffic.js";

const ready = {
  name: "ready",
  isQuick: true,
  ask: () => requestState("/readyz"),
  show: header.showReady,
  fail: header.readyFailed,
};
const model = {
  name: "model",
  everyMs: 60000,
  ask: () => request("GET", "/v1/models"),
  show: header.showModel,
  fail: header.modelFailed,
};

// Paths that the server says it has; null = it did not say. A route that is not there is not asked for.
let paths = null;
const routes = {
  name: "routes",
  isQuick: true,
  everyMs: 300000,
  ask: () => request("GET", "/openapi.json"),
  show(answer) {
    paths = new Set(Object.keys(answer.paths ?? {}));
  },
  fail() {
    paths = null;
  },
};

function ifServed(source, path) {
  return {
    ...source,
    async ask() {
      if (paths && !paths.has(path)) throw new ApiError(404, "", "no such route");
      return source.ask();
    },
  };
}

const elastic = [ifServed(devices.source, "/v1/instances"), ifServed(timeline.source, "/v1/scale")];
const poller = new Poller(
  [
    routes, // before those that ask only for what is there
    ifServed(ready, "/readyz"),
    model,
    ifServed(memory.source, "/v1/memory"),
    ifServed(adapters.source, "/v1/adapters"),
    ifServed(heat.source, "/v1/heat"),
    traffic.source,
    ...elastic,
  ],
  (error) => {
    if (error) header.readyFailed(error);
    attribute(document.body, "class", error ? "unreachable" : null);
    text(byId("reach"), error ? `The server cannot be reached: ${error.message}. Trying again.` : "");
  },
);

adapters.setUp(() => poller.refresh("adapters", "memory"));
heat.setUp();
traffic.setUp();
scale.setUp(() => poller.refresh("scale", "instances", "memory"));
header.keyForm(() => poller.refresh());
poller.wake();
