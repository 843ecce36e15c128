/** Who steered the run, when, and how. */

import { ofRun } from "../live/api.js";
import { Asker } from "../live/asker.js";
import { make } from "../parts/elements.js";
import { fail } from "../parts/messages.js";
import { column, Table } from "../parts/table.js";
import { moment, plain, spaced } from "../parts/words.js";

/** @typedef {import("../shapes.js").AuditRow} AuditRow */

/** @type {import("../parts/table.js").Column<AuditRow>[]} */
const COLUMNS = [
  column("time", "Time", 150, (row) => moment(row.time), { sort: (row) => row.time }),
  column("by", "By", 150, (row) => row.by, { sort: (row) => row.by }),
  column("what", "What", 160, (row) => spaced(row.what), { sort: (row) => row.what }),
  column("details", "Details", 460, (row) => plain(row.details)),
];

/** @param {import("./run.js").RunContext} context @returns {import("./run.js").Part} */
export function auditPart({ run }) {
  const nothing = make("p", { class: "quiet", text: "Nobody has steered this run.", hidden: true });
  const table = new Table({
    label: "Who steered the run",
    columns: COLUMNS,
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
