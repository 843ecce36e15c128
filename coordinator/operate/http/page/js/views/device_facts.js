/** All that is known of a device, as lines of words. */

import {
  ago,
  bytes,
  count,
  degrees,
  joules,
  level,
  percent,
  plain,
  seconds,
  UNKNOWN,
} from "../parts/words.js";

/** @typedef {import("../shapes.js").DeviceRow} DeviceRow */

/**
 * @param {DeviceRow} row
 * @param {number} now
 * @returns {[string, string][]}
 */
export function deviceFacts(row, now) {
  return [
    ["Level", level(row.level)],
    ["Reason", row.reason ?? UNKNOWN],
    ["Quarantine", quarantine(row)],
    ["Last seen", ago(row.last_seen, now)],
    ["Battery", battery(row)],
    ["Heat", degrees(row.temperature_c)],
    ["Memory", memory(row)],
    ["Energy today", energy(row)],
    ["Movements counted", `${count(row.trained)} (${percent(row.contribution, 1)} of all)`],
    ["Skips", count(row.skipped)],
    ["Late, refused", `${count(row.late)}, ${count(row.rejected)}`],
    ["Newest counted", row.staleness === null ? UNKNOWN : `${count(row.staleness)} rounds ago`],
    ["Training time", seconds(row.train_s)],
    ["Energy in all", joules(row.joules)],
    ["Sent, fetched", `${bytes(row.bytes_up)}, ${bytes(row.bytes_down)}`],
    ["Samples", count(row.samples)],
    ["Labels", Object.keys(row.labels).length ? plain(row.labels) : UNKNOWN],
    ["Profile", row.profile ?? UNKNOWN],
    ["Version", row.version ?? UNKNOWN],
  ];
}

/** @param {DeviceRow} row */
function quarantine({ quarantined }) {
  if (!quarantined) return "no";
  return quarantined.round === null
    ? quarantined.reason
    : `since round ${quarantined.round}: ${quarantined.reason}`;
}

/** @param {DeviceRow} row */
function battery(row) {
  if (row.battery === null) return row.charging ? "charging" : UNKNOWN;
  return `${percent(row.battery)}${row.charging ? ", charging" : ""}`;
}

/** @param {DeviceRow} row */
function memory(row) {
  if (row.memory_free_mb === null) return UNKNOWN;
  return `${count(row.memory_free_mb)} MB free of ${count(row.memory_mb)} MB`;
}

/** @param {DeviceRow} row */
function energy(row) {
  if (row.energy_budget_j === null) return joules(row.energy_today_j);
  return `${joules(row.energy_today_j)} of ${joules(row.energy_budget_j)}`;
}
