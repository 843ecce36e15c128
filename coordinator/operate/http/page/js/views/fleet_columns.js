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
    width: window.innerWidth < NARROW ? 124 : 140,
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
  width: 142,
  sort: (row) => deviceRank(row.state),
  write: (cell, row) => {
    const badge = cell.querySelector("span") ?? cell.appendChild(make("span"));
    writeDeviceState(badge, row.state);
  },
};

/** @param {DeviceRow} row */
function batteryWords(row) {
  if (row.battery === null) return row.charging ? "⚡" : UNKNOWN;
  return row.charging ? `⚡ ${percent(row.battery)}` : percent(row.battery);
}

/** @param {DeviceRow} row */
const traffic = (row) =>
  row.bytes_up === null && row.bytes_down === null
    ? null
    : (row.bytes_up ?? 0) + (row.bytes_down ?? 0);

/** @param {DeviceRow} row */
function reasonWords(row) {
  if (!row.quarantined) return row.reason ?? "";
  const { round, reason } = row.quarantined;
  return round === null ? reason : `since round ${round}: ${reason}`;
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
    column("level", "Level", 68, (row) => level(row.level), {
      numeric: true,
      sort: (row) => row.level,
      title: "The share of the model that it trains",
    }),
    column("reason", "Reason", 220, reasonWords, {
      sort: (row) => reasonWords(row) || null,
      title: "Why it trains this level, skips the round or is quarantined",
      long: true,
    }),
    column("battery", "Battery", 80, batteryWords, {
      numeric: true,
      title: "Its charge; ⚡: it is charging",
      sort: (row) => row.battery,
    }),
    column("temperature", "Heat", 78, (row) => degrees(row.temperature_c), {
      numeric: true,
      sort: (row) => row.temperature_c,
    }),
    column("seen", "Last seen", 98, (row) => ago(row.last_seen, now()), {
      numeric: true,
      sort: (row) => row.last_seen,
    }),
    column("contribution", "Share", 70, (row) => percent(row.contribution, 1), {
      numeric: true,
      sort: (row) => row.contribution,
      title: "Its share of all movements that counted",
    }),
    column("staleness", "Stale", 64, (row) => count(row.staleness), {
      numeric: true,
      sort: (row) => row.staleness,
      title: "Rounds since its newest movement that counted",
    }),
    column("bytes", "Traffic", 86, (row) => bytes(traffic(row)), {
      numeric: true,
      sort: traffic,
      title: "Bytes sent and fetched",
    }),
    column("train", "Training", 86, (row) => seconds(row.train_s), {
      numeric: true,
      sort: (row) => row.train_s,
    }),
    column("joules", "Energy", 80, (row) => joules(row.joules), {
      numeric: true,
      sort: (row) => row.joules,
    }),
  ];
}
