// What happened between two snapshots, as sentences.

import { engineName, plural, shortRequest } from "./format.js";

const STATES = {
  ready: "is ready",
  draining: "takes no new requests and drains",
  asleep: "sleeps: it has given its memory back",
  hung: "hangs: it makes no steps",
  silent: "is silent: its requests go to other engines",
  starting: "starts",
};

/** Returns sentences about what differs; `before` is null for the first snapshot. */
export function changes(before, now) {
  if (before === null) return [];
  return [...engineChanges(before, now), ...moves(before, now), ...scalings(before, now)];
}

function engineChanges(before, now) {
  const old = new Map(before.engines.map((engine) => [engine.id, engine]));
  const events = [];
  for (const engine of now.engines) {
    const was = old.get(engine.id);
    old.delete(engine.id);
    const name = engineName(engine);
    if (!was) events.push(`${name} has joined for ${engine.model}.`);
    else if (was.state !== engine.state) events.push(`${name} ${STATES[engine.state] ?? engine.state}.`);
    const preempted = (engine.preemptions ?? 0) - (was?.preemptions ?? engine.preemptions ?? 0);
    if (preempted > 0) events.push(`${name} preempted ${plural(preempted, "sequence")}: its KV blocks were full.`);
  }
  for (const engine of old.values()) events.push(`${engineName(engine)} is gone.`);
  return events;
}

/** Engines by the requests that they run; an engine that is silent runs none. */
function places(snapshot) {
  const found = new Map();
  for (const engine of snapshot.engines) {
    if (engine.state === "silent") continue;
    for (const { request } of engine.sequences ?? []) if (request) found.set(request, engine);
  }
  return found;
}

/** Remembers where requests ran, since a request is nowhere while its engine is dead. */
const lastPlaces = new Map();
const MOST_PLACES = 2000;

function moves(before, now) {
  for (const [request, engine] of places(before)) lastPlaces.set(request, engine);
  const moved = new Map();
  for (const [request, engine] of places(now)) {
    const was = lastPlaces.get(request);
    if (!was || was.id === engine.id) continue;
    lastPlaces.set(request, engine);
    const way = `from ${engineName(was)} to ${engineName(engine)}`;
    moved.set(way, [...(moved.get(way) ?? []), request]);
  }
  for (const request of lastPlaces.keys()) {
    if (lastPlaces.size <= MOST_PLACES) break;
    lastPlaces.delete(request);
  }
  return [...moved].map(([way, requests]) =>
    requests.length === 1
      ? `Request ${shortRequest(requests[0])} moved ${way} and goes on.`
      : `${plural(requests.length, "request")} moved ${way} and go on.`,
  );
}

function scalings(before, now) {
  const old = new Map(before.models.map((model) => [model.name, model.scaling]));
  return now.models.flatMap(({ name, scaling }) => {
    const was = old.get(name);
    if (!scaling || !was || was.desired === scaling.desired) return [];
    return [`${name}: ${plural(scaling.desired, "replica")} wanted instead of ${was.desired} (${scaling.reason}).`];
  });
}
