/** The columns of the fleet's table. */

import { make, setText } from "../parts/elements.js";
import { deviceRank, writeDeviceState } from "../parts/states.js";
import { column } from "../parts/table.js";
import {
  ago,
  bytes,
  count,
  degrees,
  joules,
  level,
  percent,
  seconds,
  UNKNOWN,
} from "../parts/words.js";

/** @typedef {import("../shapes.js").DeviceRow} DeviceRow */
/** @typedef {import("../parts/table.js").Column<DeviceRow>} DeviceColumn */

/** Pixels of a page on which names get less room: their column stays when others are scrolled. */
const NARROW = 640;

/**
 * @param {(row: DeviceRow) => string} goTo
 * @returns {DeviceColumn}
 */
export function deviceColumn(goTo) {
  return {
    key: "device",
    label: "Device",
    width: window.innerWidth < NARROW ? 124 : 170,
    sort: (row) => row.device,
    write: (cell, row) => {
      const link = cell.querySelector("a") ?? cell.appendChild(make("a"));
      setText(link, row.device);
      const to = goTo(row);
      if (link.getAttribute("href") !== to) link.setAttribute("href", to);
      if (cell.title !== row.device) cell.title = row.device;
    },
  };
}

/** @type {DeviceColumn} */
export const stateColumn = {
  key: "state",
  label: "State",
  width: 146,
  sort: (row) => deviceRank(row.state),
  write: (cell, row) => {
    const badge = cell.querySelector("span") ?? cell.appendChild(make("span"));
    writeDeviceState(badge, row.state);
  },
};

/** @param {DeviceRow} row */
function batteryWords(row) {
  if (row.battery === null) return row.charging ? "charging" : UNKNOWN;
  return row.charging ? `${percent(row.battery)} charging` : percent(row.battery);
}

/** @param {DeviceRow} row */
const traffic = (row) =>
  row.bytes_up === null && row.bytes_down === null
    ? null
    : (row.bytes_up ?? 0) + (row.bytes_down ?? 0);

/** @param {DeviceRow} row */
function quarantineWords(row) {
  if (!row.quarantined) return "";
  const { round, reason } = row.quarantined;
  return round === null ? reason : `round ${round}: ${reason}`;
}

/**
 * @param {(row: DeviceRow) => string} goTo
 * @param {() => number} now
 * @returns {DeviceColumn[]}
 */
export function fleetColumns(goTo, now) {
  return [
    deviceColumn(goTo),
    stateColumn,
    column("level", "Level", 70, (row) => level(row.level), {
      numeric: true,
      sort: (row) => row.level,
      title: "The share of the model that it trains",
    }),
    column("reason", "Reason", 230, (row) => row.reason ?? "", { sort: (row) => row.reason }),
    column("battery", "Battery", 118, batteryWords, {
      numeric: true,
      sort: (row) => row.battery,
    }),
    column("temperature", "Heat", 84, (row) => degrees(row.temperature_c), {
      numeric: true,
      sort: (row) => row.temperature_c,
    }),
    column("seen", "Last seen", 104, (row) => ago(row.last_seen, now()), {
      numeric: true,
      sort: (row) => row.last_seen,
    }),
    column("contribution", "Share", 76, (row) => percent(row.contribution, 1), {
      numeric: true,
      sort: (row) => row.contribution,
      title: "Its share of all movements that counted",
    }),
    column("staleness", "Stale", 76, (row) => count(row.staleness), {
      numeric: true,
      sort: (row) => row.staleness,
      title: "Rounds since its newest movement that counted",
    }),
    column("bytes", "Traffic", 92, (row) => bytes(traffic(row)), {
      numeric: true,
      sort: traffic,
      title: "Bytes sent and fetched",
    }),
    column("train", "Training", 92, (row) => seconds(row.train_s), {
      numeric: true,
      sort: (row) => row.train_s,
    }),
    column("joules", "Energy", 86, (row) => joules(row.joules), {
      numeric: true,
      sort: (row) => row.joules,
    }),
    column("quarantine", "Quarantine", 210, quarantineWords, {
      sort: (row) => row.quarantined?.round ?? (row.quarantined ? 0 : null),
    }),
    column("error", "Last error", 230, (row) => row.last_error ?? "", {
      sort: (row) => row.last_error,
    }),
  ];
}
