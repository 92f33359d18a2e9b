// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

/** A rate or another number of which three digits are enough. */
export const rate = (value) => (value >= 100 ? whole.format(value) : value.toFixed(1));

export function seconds(value) {
  if (value < 0.001) return "0 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The id of a request as its client sees it: the queue's is `<shard>.<id>`, or longer. */
export const requestId = (id) => id.split(".")[1] ?? id;

export const shortRequest = (id) => requestId(id).slice(0, 8);

export const clockTime = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString();

/** An engine's name; without one the end of its id, since beginnings are often the same. */
export const engineName = ({ id, name = null }) => name ?? id.slice(-6);
