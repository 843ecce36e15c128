/** Numbers, sizes and times in words. `null` is a dash: not known. */

export const UNKNOWN = "–";

/** @typedef {number | null | undefined} Known */

/** @param {Known} value @returns {value is number} */
const known = (value) => typeof value === "number" && Number.isFinite(value);

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {Known} value */
export const count = (value) => (known(value) ? whole.format(value) : UNKNOWN);

/** @param {Known} value 0..1 @param {number} [digits] */
export const percent = (value, digits = 0) =>
  known(value) ? `${(value * 100).toFixed(digits)} %` : UNKNOWN;

/** @param {Known} value a share of a whole model, 0..1 */
export const level = (value) =>
  known(value) ? `${Number((value * 100).toFixed(1))} %` : UNKNOWN;

/** @param {Known} value three digits that matter */
export function number(value) {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return whole.format(value);
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** @param {number} value @param {string[]} units each a thousand times the one before */
function scaled(value, units) {
  let at = 0;
  let rest = value;
  while (Math.abs(rest) >= 1000 && at < units.length - 1) {
    rest /= 1000;
    at += 1;
  }
  const digits = at === 0 || Math.abs(rest) >= 100 ? 0 : 1;
  return `${rest.toFixed(digits)} ${units[at]}`;
}

/** @param {Known} value */
export const bytes = (value) =>
  known(value) ? scaled(value, ["B", "kB", "MB", "GB", "TB"]) : UNKNOWN;

/** @param {Known} value */
export const joules = (value) => (known(value) ? scaled(value, ["J", "kJ", "MJ", "GJ"]) : UNKNOWN);

/** @param {Known} value */
export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 10) return `${Number(value.toFixed(1))} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} days`;
}

/** @param {Known} time @param {number} now both in Unix seconds */
export function ago(time, now) {
  if (!known(time)) return "never";
  const passed = Math.max(0, now - time);
  return passed < 3 ? "now" : `${seconds(passed < 10 ? Math.round(passed) : passed)} ago`;
}

/** @param {Known} value */
export const degrees = (value) => (known(value) ? `${value.toFixed(1)} °C` : UNKNOWN);

const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  hourCycle: "h23",
});
const date = new Intl.DateTimeFormat(undefined, {
  day: "numeric",
  month: "short",
  hour: "2-digit",
  minute: "2-digit",
  hourCycle: "h23",
});

/** @param {Known} time Unix seconds */
export function moment(time) {
  if (!known(time)) return UNKNOWN;
  const when = new Date(time * 1000);
  const today = when.toDateString() === new Date().toDateString();
  return (today ? clock : date).format(when);
}

/** @param {string} value */
export const sentence = (value) => value.charAt(0).toUpperCase() + value.slice(1);

/** @param {string} name of a setting, as in the run file */
export const spaced = (name) => name.replaceAll("_", " ");

/**
 * The level to deploy, and its accuracy in the newest round; null: nothing is known of one.
 *
 * @param {import("../shapes.js").Status} status
 */
export const deployed = ({ deploy, level_reports }) =>
  level_reports.find((each) => each.level === deploy) ?? null;

/** @param {unknown} value of any setting or detail @returns {string} */
export function plain(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (Array.isArray(value)) return value.map(plain).join(", ");
  if (typeof value === "object") {
    return Object.entries(value)
      .map(([name, each]) => `${name} ${plain(each)}`)
      .join(", ");
  }
  return String(value);
}

/** @param {number} amount @param {string} one @param {string} [many] */
export const counted = (amount, one, many = `${one}s`) =>
  `${whole.format(amount)} ${amount === 1 ? one : many}`;
