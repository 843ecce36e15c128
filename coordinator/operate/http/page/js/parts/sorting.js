/** The order of a table's rows, and the buttons in its head that change it. */

import { make } from "./elements.js";

const collator = new Intl.Collator("en", { numeric: true });

/** @param {string | number} one @param {string | number} other */
const compared = (one, other) =>
  typeof one === "number" && typeof other === "number"
    ? one - other
    : collator.compare(String(one), String(other));

/**
 * Rows by a value; those without one are last in either direction, equal ones are by key.
 *
 * @template Row
 * @param {Row[]} rows
 * @param {(row: Row) => string | number | null} by
 * @param {(row: Row) => string} keyOf
 * @param {boolean} down
 * @returns {Row[]}
 */
export function inOrder(rows, by, keyOf, down) {
  return rows
    .map((row) => ({ row, value: by(row), key: keyOf(row) }))
    .sort((one, other) => {
      if (one.value === null || other.value === null) {
        if (one.value !== other.value) return one.value === null ? 1 : -1;
        return compared(one.key, other.key);
      }
      const order = compared(one.value, other.value);
      return (down ? -order : order) || compared(one.key, other.key);
    })
    .map((each) => each.row);
}

/**
 * A cell of a table's head.
 *
 * @param {{label: string, title?: string | undefined, numeric?: boolean | undefined}} column
 * @param {{down: boolean} | null} sorted
 * @param {(() => void) | undefined} press absent: the column cannot be sorted
 */
export function sortHeader(column, sorted, press) {
  const direction = sorted ? (sorted.down ? "descending" : "ascending") : null;
  return make(
    "th",
    {
      scope: "col",
      class: column.numeric ? "number" : "",
      title: column.title,
      "aria-sort": direction,
    },
    press ? make("button", { type: "button", text: column.label, click: press }) : column.label,
  );
}
