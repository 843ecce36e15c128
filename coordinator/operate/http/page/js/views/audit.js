/** Who steered the run, when, and how. */

import { ofRun } from "../live/api.js";
import { Asker } from "../live/asker.js";
import { make } from "../parts/elements.js";
import { fail } from "../parts/messages.js";
import { column, Table } from "../parts/table.js";
import { moment, plain, spaced } from "../parts/words.js";

/** @typedef {import("../shapes.js").AuditRow} AuditRow */

/** Pixels of a page on which rows have several lines. */
const NARROW = 640;

/** @param {boolean} narrow @returns {import("../parts/table.js").Column<AuditRow>[]} */
function columns(narrow) {
  const by = column("by", "By", narrow ? 130 : 190, (/** @type {AuditRow} */ row) => row.by, {
    sort: (row) => row.by,
  });
  return [
    column("time", "Time", narrow ? 72 : 150, (row) => moment(row.time), {
      sort: (row) => row.time,
    }),
    ...(narrow ? [] : [by]),
    column("what", "What", narrow ? 92 : 160, (row) => spaced(row.what), {
      sort: (row) => row.what,
    }),
    column("details", "Details", narrow ? 150 : 300, (row) => plain(row.details), { long: true }),
    ...(narrow ? [by] : []),
  ];
}

/** @param {import("./run.js").RunContext} context @returns {import("./run.js").Part} */
export function auditPart({ run }) {
  const nothing = make("p", { class: "quiet", text: "Nobody has steered this run.", hidden: true });
  const narrow = window.innerWidth < NARROW;
  const table = new Table({
    label: "Who steered the run",
    columns: columns(narrow),
    tall: narrow,
    keyOf: (/** @type {AuditRow} */ row) => `${row.time} ${row.by} ${row.what}`,
  });
  table.element.hidden = true;

  /** @param {AuditRow[]} rows */
  function take(rows) {
    nothing.hidden = rows.length > 0;
    table.element.hidden = rows.length === 0;
    table.show(rows.reverse());
  }
  const asker = new Asker(ofRun(run.task, "audit"), take, fail);
  return {
    element: make("div", { class: "fleet" }, nothing, table.element),
    paint: () => asker.ask(run.status?.sequence),
    close: () => asker.close(),
  };
}
