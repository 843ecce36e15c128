/** Every round of a run, and all that happened between them. */

import { make } from "../parts/elements.js";
import { column, Table } from "../parts/table.js";
import { bytes, count, joules, level, moment, percent, seconds } from "../parts/words.js";

/** @typedef {import("../shapes.js").RoundRow} RoundRow */

let eventsAlone = false;

/** @param {(row: RoundRow) => number | null} of */
const numeric = (of) => ({ numeric: true, sort: of });

/** @type {import("../parts/table.js").Column<RoundRow>[]} */
const COLUMNS = [
  column(
    "round",
    "Round",
    76,
    (row) => count(row.round),
    numeric((row) => row.round),
  ),
  column("time", "Time", 124, (row) => moment(row.time), { sort: (row) => row.time }),
  column("event", "Event", 260, (row) => row.event ?? "", { sort: (row) => row.event }),
  column(
    "accuracy",
    "Accuracy",
    90,
    (row) => percent(row.accuracy, 1),
    numeric((row) => row.accuracy),
  ),
  column("levels", "By level", 230, (row) =>
    row.levels.map((each) => `${level(each.level)}: ${percent(each.accuracy, 1)}`).join("  "),
  ),
  column(
    "trained",
    "Trained",
    84,
    (row) => count(row.trained),
    numeric((row) => row.trained),
  ),
  column(
    "skipped",
    "Skipped",
    86,
    (row) => count(row.skipped),
    numeric((row) => row.skipped),
  ),
  column(
    "late",
    "Late",
    64,
    (row) => count(row.late),
    numeric((row) => row.late),
  ),
  column(
    "rejected",
    "Refused",
    84,
    (row) => count(row.rejected),
    numeric((row) => row.rejected),
  ),
  column(
    "seconds",
    "Took",
    84,
    (row) => seconds(row.seconds),
    numeric((row) => row.seconds),
  ),
  column(
    "joules",
    "Energy",
    88,
    (row) => joules(row.joules),
    numeric((row) => row.joules),
  ),
  column(
    "up",
    "Sent",
    88,
    (row) => bytes(row.bytes_up),
    numeric((row) => row.bytes_up),
  ),
  column(
    "down",
    "Fetched",
    88,
    (row) => bytes(row.bytes_down),
    numeric((row) => row.bytes_down),
  ),
  column(
    "coverage",
    "Least covered",
    116,
    (row) => count(row.coverage_min),
    numeric((row) => row.coverage_min),
  ),
  column(
    "memory",
    "Oldest memory",
    120,
    (row) => count(row.oldest_memory),
    numeric((row) => row.oldest_memory),
  ),
  column("digest", "Model", 110, (row) => row.digest ?? ""),
];

/** @param {import("./run.js").RunContext} context @returns {import("./run.js").Part} */
export function historyPart({ run }) {
  const box = make("input", {
    type: "checkbox",
    checked: eventsAlone,
    change: () => {
      eventsAlone = box.checked;
      paint();
    },
  });
  const table = new Table({
    label: "Rounds and events",
    columns: COLUMNS,
    keyOf: (/** @type {RoundRow} */ row) => `${row.round} ${row.time} ${row.event ?? ""}`,
  });
  const nothing = make("p", { class: "quiet", text: "Nothing yet." });

  function paint() {
    const rows = run.rounds.filter((row) => !eventsAlone || row.event).reverse();
    nothing.hidden = rows.length > 0;
    table.element.hidden = rows.length === 0;
    table.show(rows);
  }
  return {
    element: make(
      "div",
      { class: "fleet" },
      make("div", { class: "toolbar" }, make("label", { class: "check" }, box, " Events alone")),
      nothing,
      table.element,
    ),
    paint,
  };
}
