/** One device: its state, its last rounds, and what can be done about it. */

import { ofDevice } from "../live/api.js";
import { Asker } from "../live/asker.js";
import { fill, make, setText } from "../parts/elements.js";
import { Plot } from "../parts/plot.js";
import { writeDeviceState } from "../parts/states.js";
import { column, Table } from "../parts/table.js";
import { bytes, count, joules, level, moment, number, percent, seconds } from "../parts/words.js";
import { deviceButtons } from "./device_buttons.js";
import { deviceFacts } from "./device_facts.js";
import { writeFacts } from "./overview.js";

/** @typedef {import("../shapes.js").DeviceRound} DeviceRound */
/** @typedef {import("../shapes.js").Device} Device */

/** @type {import("../parts/table.js").Column<DeviceRound>[]} */
const COLUMNS = [
  column("round", "Round", 76, (row) => count(row.round), {
    numeric: true,
    sort: (row) => row.round,
  }),
  column("level", "Level", 72, (row) => level(row.level), {
    numeric: true,
    sort: (row) => row.level,
  }),
  column("outcome", "Outcome", 110, (row) => row.outcome ?? "", { sort: (row) => row.outcome }),
  column("reason", "Reason", 240, (row) => row.reason ?? "", {
    sort: (row) => row.reason,
    long: true,
  }),
  column("loss", "Loss", 84, (row) => number(row.loss), { numeric: true, sort: (row) => row.loss }),
  column("train", "Training", 92, (row) => seconds(row.train_s), {
    numeric: true,
    sort: (row) => row.train_s,
  }),
  column("joules", "Energy", 88, (row) => joules(row.joules), {
    numeric: true,
    sort: (row) => row.joules,
  }),
  column("up", "Sent", 88, (row) => bytes(row.bytes_up), {
    numeric: true,
    sort: (row) => row.bytes_up,
  }),
  column("down", "Fetched", 88, (row) => bytes(row.bytes_down), {
    numeric: true,
    sort: (row) => row.bytes_down,
  }),
];

/**
 * @param {import("./run.js").RunContext} context
 * @param {string} name
 * @returns {import("./run.js").Part}
 */
export function devicePart({ run, canSteer, address }, name) {
  const badge = make("span");
  const fault = make("p");
  const facts = make("dl", { class: "facts" });
  const plot = new Plot("Loss and level", "It has not trained yet.");
  const buttons = canSteer ? deviceButtons(run, name) : null;
  const rounds = new Table({
    label: "Its last rounds",
    columns: COLUMNS,
    keyOf: (/** @type {DeviceRound} */ row) => String(row.round),
  });
  const found = make(
    "div",
    { class: "device", hidden: true },
    fault,
    make("section", { class: "card facts-card" }, make("h3", { text: "Facts" }), facts),
    make("section", { class: "card" }, make("h3", { text: "Loss and level" }), plot.element),
    make(
      "section",
      { class: "card wide" },
      make("h3", { text: "Its last rounds" }),
      rounds.element,
    ),
  );
  const missing = make("p", { class: "quiet", role: "status" });
  const asker = new Asker(ofDevice(run.task, name), draw, refused);

  function paint() {
    const row = run.devices.get(name);
    if (row) {
      writeDeviceState(badge, row.state);
      buttons?.paint(row);
      writeFacts(facts, deviceFacts(row, run.now));
    }
    asker.ask(`${row?.sequence} ${run.status?.committed}`);
  }

  /** @param {unknown} error */
  function refused(error) {
    setText(missing, error instanceof Error ? error.message : String(error));
    found.hidden = true;
  }

  /** @param {Device} device */
  function draw(device) {
    setText(missing, "");
    found.hidden = false;
    writeFacts(facts, deviceFacts(device, run.now));
    drawError(device);
    rounds.show([...device.rounds].reverse());
    plot.show(picture(device.rounds));
  }

  /** @param {Device} device */
  function drawError(device) {
    const { last_error, last_error_time } = device;
    const over = last_error_time !== null && trainedAfter(device, last_error_time);
    const when = last_error_time === null ? "" : `, ${moment(last_error_time)}`;
    const since = over ? " (it has trained since)" : "";
    fault.className = over ? "last-error over" : "last-error";
    fill(fault, [last_error, when, since], () =>
      last_error ? [make("strong", { text: `Last error${when}${since}: ` }), last_error] : [],
    );
    fault.hidden = !last_error;
  }

  /** @param {Device} device @param {number} time */
  function trainedAfter(device, time) {
    const trained = new Set(
      device.rounds.filter((row) => row.outcome === "counted").map((row) => row.round),
    );
    return run.rounds.some(
      (row) => !row.event && row.time !== null && row.time > time && trained.has(row.round),
    );
  }

  return {
    element: make(
      "div",
      {},
      make(
        "div",
        { class: "device-head" },
        make("a", { href: address("fleet"), text: "← Fleet" }),
        make("h2", { text: name }),
        badge,
        buttons?.element ?? null,
      ),
      missing,
      found,
    ),
    paint,
    close: () => {
      plot.close();
      asker.close();
    },
  };
}

/** @param {DeviceRound[]} rounds @returns {import("../parts/plot.js").Picture} */
function picture(rounds) {
  const rows = [...new Map(rounds.map((row) => [row.round, row])).values()];
  rows.sort((one, other) => one.round - other.round);
  return {
    xLabel: "rounds",
    right: { range: [0, 1], tick: (value) => percent(value) },
    x: rows.map((row) => row.round),
    curves: [
      { label: "loss", colour: "--curve-0", values: rows.map((row) => row.loss) },
      {
        label: "level",
        colour: "--curve-1",
        values: rows.map((row) => row.level),
        points: true,
        right: true,
        word: level,
      },
    ],
  };
}
