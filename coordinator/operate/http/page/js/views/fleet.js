/** All devices of a run as a table: found by words and states, sorted by any column. */

import { fill, make, setText } from "../parts/elements.js";
import { DEVICE_STATES, deviceMeaning } from "../parts/states.js";
import { Table } from "../parts/table.js";
import { count, counted } from "../parts/words.js";
import { fleetColumns } from "./fleet_columns.js";

/** @typedef {import("../shapes.js").DeviceRow} DeviceRow */

/** What was chosen stays while the page is open. */
const chosen = { text: "", states: /** @type {Set<string>} */ (new Set()) };

/**
 * A field for words and a chip for each state.
 *
 * @param {() => void} changed
 */
export function fleetFilter(changed) {
  const input = make("input", {
    type: "search",
    id: "fleet-filter",
    value: chosen.text,
    placeholder: "name, label, reason …",
    autocomplete: "off",
    spellcheck: "false",
    input: () => {
      chosen.text = input.value;
      changed();
    },
  });
  const chips = make("div", { class: "chips", role: "group", "aria-label": "States" });
  const shown = make("p", { class: "quiet shown", role: "status" });
  const element = make(
    "div",
    { class: "toolbar" },
    make("div", { class: "field" }, make("label", { for: "fleet-filter", text: "Find" }), input),
    chips,
    shown,
  );
  const buttons = DEVICE_STATES.map((state) => {
    const number = make("span", { class: "number" });
    const button = make(
      "button",
      {
        type: "button",
        class: "chip",
        title: deviceMeaning(state),
        "aria-pressed": String(chosen.states.has(state)),
        click: () => {
          if (!chosen.states.delete(state)) chosen.states.add(state);
          button.setAttribute("aria-pressed", String(chosen.states.has(state)));
          changed();
        },
      },
      `${state} `,
      number,
    );
    chips.append(button);
    return { state, button, number };
  });

  /** @param {DeviceRow[]} rows */
  function apply(rows) {
    /** @type {Map<string, number>} */
    const numbers = new Map();
    for (const row of rows) numbers.set(row.state, (numbers.get(row.state) ?? 0) + 1);
    for (const { state, button, number } of buttons) {
      const here = numbers.get(state) ?? 0;
      setText(number, count(here));
      button.hidden = here === 0 && !chosen.states.has(state);
    }
    const words = chosen.text
      .toLowerCase()
      .split(/\s+/)
      .filter((word) => word);
    const found = rows.filter(
      (row) =>
        (chosen.states.size === 0 || chosen.states.has(row.state)) &&
        (words.length === 0 || matches(row, words)),
    );
    const all = counted(rows.length, "device");
    setText(shown, found.length === rows.length ? all : `${count(found.length)} of ${all}`);
    return found;
  }
  return { element, apply };
}

/** @param {DeviceRow} row @param {string[]} words */
function matches(row, words) {
  const labels = Object.entries(row.labels).map(([name, value]) => `${name}=${value}`);
  const text = [row.device, row.state, row.reason, row.code, row.profile, row.last_error, ...labels]
    .join(" ")
    .toLowerCase();
  return words.every((word) => text.includes(word));
}

/** @param {import("./run.js").RunContext} context @returns {import("./run.js").Part} */
export function fleetPart({ run, address }) {
  const goTo = (/** @type {DeviceRow} */ row) => address("device", row.device);
  const filter = fleetFilter(paint);
  const table = new Table({
    label: "Devices",
    columns: fleetColumns(goTo, () => run.now),
    keyOf: (/** @type {DeviceRow} */ row) => row.device,
    goTo,
    sorting: { key: "device", down: false },
  });
  const nobody = make("p", { class: "quiet" });
  // Ages grow although nothing else changes.
  const clock = window.setInterval(() => table.repaint(), 5000);

  function paint() {
    const found = filter.apply([...run.devices.values()]);
    table.show(found);
    table.element.hidden = found.length === 0;
    fill(nobody, [found.length, run.devices.size], () => [
      found.length
        ? ""
        : run.devices.size
          ? "No device fits this filter."
          : "No device has come yet. Join one with tessera-device join, or start one that is enrolled.",
    ]);
  }
  return {
    element: make("div", { class: "fleet" }, filter.element, nobody, table.element),
    paint,
    close: () => window.clearInterval(clock),
  };
}
