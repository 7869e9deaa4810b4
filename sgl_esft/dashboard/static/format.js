// Numbers and times as people read them. Everything here is text in, text out.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UNITS = ["B", "KB", "MB", "GB", "TB"];
export const NOTHING = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return isNumber(value) ? whole.format(value) : NOTHING;
}

// Powers of 1000, as `sgl-esft memory` prints them.
export function bytes(value) {
  if (!isNumber(value)) return NOTHING;
  let unit = 0;
  let rest = value;
  while (rest >= 999.5 && unit < UNITS.length - 1) {
    rest /= 1000;
    unit += 1;
  }
  return `${unit === 0 || rest >= 100 ? rest.toFixed(0) : rest.toPrecision(3)} ${UNITS[unit]}`;
}

export function short(value) {
  if (!isNumber(value)) return NOTHING;
  if (value === 0) return "0";
  if (value >= 9999.5) return bytes(value).replace(/B$/, "").trimEnd().replace(" K", "k").replace(" ", "");
  if (value >= 99.95) return whole.format(value);
  return value >= 9.995 ? value.toFixed(1) : value.toPrecision(2);
}

export function seconds(value) {
  if (!isNumber(value)) return NOTHING;
  if (value < 0.9995) return `${value < 0.00995 ? (value * 1000).toFixed(1) : (value * 1000).toFixed(0)} ms`;
  if (value < 99.5) return `${value.toPrecision(3)} s`;
  return value < 5940 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
}

// `then` in ms of Unix time, or null.
export function ago(then, now = Date.now()) {
  if (!isNumber(then)) return "never";
  const passed = Math.max(0, (now - then) / 1000);
  if (passed < 2) return "now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  return passed < 86400 ? `${Math.floor(passed / 3600)} h ago` : `${Math.floor(passed / 86400)} d ago`;
}

export function clock(unixSeconds) {
  return isNumber(unixSeconds) ? new Date(unixSeconds * 1000).toLocaleTimeString("en-GB") : NOTHING;
}

// [0, 1, 2, 5] -> "0-2, 5"
export function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const parts = [];
  for (const number of sorted) {
    const last = parts.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, end]) => (first === end ? `${first}` : `${first}-${end}`)).join(", ") || "none";
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}
