/** A strip for each device: a cell per round, with its level, or why it has none. */

import { ofRun } from "../live/api.js";
import { Asker } from "../live/asker.js";
import { fill, make, setText } from "../parts/elements.js";
import { fail } from "../parts/messages.js";
import { CELL_WIDTH, cellAt, drawStrip, legendCell, NOTHING } from "../parts/strip_canvas.js";
import { Table } from "../parts/table.js";
import { colour, whenColoursChange } from "../parts/theme.js";
import { counted } from "../parts/words.js";
import { fleetFilter } from "./fleet.js";
import { deviceColumn, stateColumn } from "./fleet_columns.js";

/** @typedef {import("../shapes.js").DeviceRow} DeviceRow */
/** @typedef {import("../shapes.js").Strip} Strip */

const ROUNDS = 60;

/** @param {import("./run.js").RunContext} context @returns {import("./run.js").Part} */
export function stripsPart({ run, address }) {
  /** @type {Strip} */
  let strip = { rounds: [], devices: {}, legend: {} };
  const asker = new Asker(ofRun(run.task, `strip?rounds=${ROUNDS}`), take, fail);
  /** The cell that is read out: a device, and its place among the rounds. */
  const cursor = { device: "", at: -1 };
  const readout = make("p", { class: "readout", "aria-live": "polite" });
  const legend = make("ul", { class: "strip-legend" });
  const place = make("div", { class: "strips" });
  const filter = fleetFilter(paint);
  const goTo = (/** @type {DeviceRow} */ row) => address("device", row.device);
  /** @type {Table<DeviceRow> | null} */
  let table = null;
  let width = 0;

  const textOf = (/** @type {string} */ device) => strip.devices[device] ?? "";

  /** @param {string} device @param {number} at */
  function point(device, at) {
    cursor.device = device;
    cursor.at = at;
    const sign = textOf(device)[at] ?? NOTHING;
    const round = strip.rounds[at];
    setText(
      readout,
      round === undefined ? HINT : `${device}, round ${round}: ${strip.legend[sign] ?? sign}`,
    );
    table?.repaint();
  }

  /** @param {HTMLTableCellElement} cell @param {DeviceRow} row */
  function write(cell, row) {
    let canvas = cell.querySelector("canvas");
    if (!canvas) {
      canvas = make("canvas", {
        role: "img",
        mousemove: (/** @type {MouseEvent} */ event) => {
          const device = canvas?.dataset["device"] ?? "";
          const at = cellAt(event);
          if (device !== cursor.device || at !== cursor.at) point(device, at);
        },
      });
      cell.append(canvas);
    }
    canvas.dataset["device"] = row.device;
    const text = textOf(row.device);
    drawStrip(canvas, text, strip.rounds.length, cursor.device === row.device ? cursor.at : -1);
    const words = summary(text, strip.legend);
    if (canvas.getAttribute("aria-label") !== words) canvas.setAttribute("aria-label", words);
  }

  /** @param {KeyboardEvent} event @param {DeviceRow} row */
  function onKey(event, row) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return false;
    const last = strip.rounds.length - 1;
    const from = cursor.device === row.device ? cursor.at : last + 1;
    point(row.device, Math.max(0, Math.min(last, from + step)));
    return true;
  }

  function makeTable() {
    const [first, last] = [strip.rounds[0], strip.rounds.at(-1)];
    width = strip.rounds.length;
    table = new Table({
      label: "Devices over rounds",
      columns: [
        deviceColumn(goTo),
        stateColumn,
        {
          key: "strip",
          label: first === undefined ? "Rounds" : `Rounds ${first} to ${last}`,
          width: Math.max(140, width * CELL_WIDTH + 20),
          write,
        },
      ],
      keyOf: (row) => row.device,
      goTo,
      sorting: { key: "device", down: false },
      onKey,
    });
    place.replaceChildren(table.element);
    // The newest rounds are at the right.
    table.element.scrollLeft = table.element.scrollWidth;
  }

  /** @param {Strip} answer */
  function take(answer) {
    const before = strip.rounds.at(-1);
    strip = answer;
    if (!table || strip.rounds.length !== width || strip.rounds.at(-1) !== before) makeTable();
    paint();
  }

  function paint() {
    asker.ask(`${run.status?.committed} ${run.status?.totals.late} ${run.devices.size}`);
    drawLegend(legend, strip);
    if (cursor.at < 0) setText(readout, HINT);
    table?.show(filter.apply([...run.devices.values()]));
  }
  const ended = whenColoursChange(() => {
    makeTable();
    paint();
  });

  return {
    element: make("div", { class: "fleet" }, filter.element, legend, readout, place),
    paint,
    close: () => {
      ended();
      asker.close();
    },
  };
}

const HINT =
  "Point at a cell, or press the left and right arrow keys on a device, to read a round.";

/** Signs that occur, in the order of the coordinator's legend. @param {Element} place @param {Strip} strip */
function drawLegend(place, strip) {
  const there = new Set(Object.values(strip.devices).join(""));
  const shown = Object.entries(strip.legend).filter(([sign]) => there.has(sign));
  const order = (/** @type {string} */ sign) => (sign >= "1" && sign <= "9" ? -Number(sign) : 0);
  shown.sort(([one], [other]) => order(one) - order(other));
  fill(place, [shown, colour("--ink")], () =>
    shown.map(([sign, words]) => make("li", {}, legendCell(sign), words)),
  );
}

/** @param {string} text @param {Record<string, string>} legend */
function summary(text, legend) {
  /** @type {Map<string, number>} */
  const numbers = new Map();
  for (const sign of text) if (sign !== NOTHING) numbers.set(sign, (numbers.get(sign) ?? 0) + 1);
  const words = [...numbers].map(([sign, number]) => `${legend[sign] ?? sign} ${number}`);
  return `${counted(text.length, "round")}: ${words.join(", ") || "not asked"}`;
}
