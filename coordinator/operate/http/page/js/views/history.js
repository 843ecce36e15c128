/** Every round of a run, and all that happened between them. */

import { make } from "../parts/elements.js";
import { column, Table } from "../parts/table.js";
import { bytes, count, joules, level, moment, percent, seconds } from "../parts/words.js";

/** @typedef {import("../shapes.js").RoundRow} RoundRow */

let eventsAlone = false;

/** @param {(row: RoundRow) => number | null} of */
const numeric = (of) => ({ numeric: true, sort: of });

/** @param {RoundRow} row */
const levelsOrEvent = (row) =>
  row.event ??
  row.levels.map((each) => `${level(each.level)}: ${percent(each.accuracy, 1)}`).join(", ");

/** @type {import("../parts/table.js").Column<RoundRow>[]} */
const COLUMNS = [
  column(
    "round",
    "Round",
    74,
    (row) => count(row.round),
    numeric((row) => row.round),
  ),
  column(
    "accuracy",
    "Accuracy",
    96,
    (row) => percent(row.accuracy, 1),
    { ...numeric((row) => row.accuracy), title: "Of the whole model" },
  ),
  column("time", "Time", 104, (row) => moment(row.time), { sort: (row) => row.time }),
  column("levels", "By level, or event", 316, levelsOrEvent, {
    sort: (row) => row.event,
    long: true,
  }),
  column(
    "trained",
    "Trained",
    82,
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
    62,
    (row) => count(row.late),
    numeric((row) => row.late),
  ),
  column(
    "rejected",
    "Refused",
    86,
    (row) => count(row.rejected),
    numeric((row) => row.rejected),
  ),
  column(
    "seconds",
    "Took",
    70,
    (row) => seconds(row.seconds),
    numeric((row) => row.seconds),
  ),
  column(
    "joules",
    "Energy",
    80,
    (row) => joules(row.joules),
    numeric((row) => row.joules),
  ),
  column(
    "up",
    "Sent",
    76,
    (row) => bytes(row.bytes_up),
    numeric((row) => row.bytes_up),
  ),
  column(
    "down",
    "Fetched",
    86,
    (row) => bytes(row.bytes_down),
    numeric((row) => row.bytes_down),
  ),
  column(
    "coverage",
    "Covered",
    88,
    (row) => count(row.coverage_min),
    {
      ...numeric((row) => row.coverage_min),
      title: "Times that the least covered block was trained",
    },
  ),
  column(
    "memory",
    "Memory",
    88,
    (row) => count(row.oldest_memory),
    { ...numeric((row) => row.oldest_memory), title: "Rounds since its oldest remembered movement" },
  ),
  column("digest", "Model", 96, (row) => row.digest ?? ""),
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
