/**
 * A table of any length: only the rows that can be seen are in the document.
 *
 * Rows have one height. Where rows lead somewhere, one of them is in the tab order and the arrow
 * keys, Page Up and Down, Home and End move to the others.
 */

import { markEdges } from "./edges.js";
import { make, setText } from "./elements.js";
import { inOrder, sortHeader } from "./sorting.js";

/** Rows above and below those that can be seen. */
const SPARE = 6;
/** Pixels, until a row has been measured. */
const USUAL_HEIGHT = 34;
/** Rows that are shown before the table has been laid out. */
const FIRST_ROWS = 20;

/**
 * @template Row
 * @typedef {object} Column
 * @property {string} key
 * @property {string} label
 * @property {number} width in pixels
 * @property {(cell: HTMLTableCellElement, row: Row) => void} write
 * @property {((row: Row) => string | number | null) | undefined} [sort] absent: cannot be sorted
 * @property {string | undefined} [title] what it is, in a sentence
 * @property {boolean | undefined} [numeric]
 * @property {boolean | undefined} [long] gets the room that others leave, and shows its whole text
 *   to the mouse and to the focus
 */

/**
 * A column of texts.
 *
 * @template Row
 * @param {string} key @param {string} label @param {number} width
 * @param {(row: Row) => string} text
 * @param {Partial<Column<Row>>} [more]
 * @returns {Column<Row>}
 */
export function column(key, label, width, text, more = {}) {
  const write = (/** @type {HTMLTableCellElement} */ cell, /** @type {Row} */ row) => {
    const shown = text(row);
    const place = more.long ? (cell.querySelector("span") ?? cell.appendChild(make("span"))) : cell;
    setText(place, shown);
    if (!more.long && cell.title !== shown) cell.title = shown;
  };
  return { key, label, width, write, ...more };
}

/**
 * Marks the long texts of a row that are cut off: those can be shown whole.
 *
 * @param {EventTarget | null} target
 */
function markCut(target) {
  const row = target instanceof Element ? target.closest("tr") : null;
  for (const cell of row?.querySelectorAll("td.long") ?? []) {
    const text = cell.firstElementChild;
    if (!(text instanceof HTMLElement)) continue;
    cell.classList.remove("cut");
    const cut = text.scrollWidth > text.clientWidth || text.scrollHeight > text.clientHeight + 1;
    cell.classList.toggle("cut", cut);
  }
}

/** @template Row */
export class Table {
  element;
  #scroller;
  /** @type {Row[]} */
  #rows = [];
  #columns;
  #keyOf;
  #goTo;
  #onKey;
  #sorting;
  #body = make("tbody");
  #above = make("td", { class: "space" });
  #below = make("td", { class: "space" });
  #table;
  #height = USUAL_HEIGHT;
  #active = "";
  #first = 0;
  #frame = 0;

  /**
   * @param {object} options
   * @param {string} options.label what the table shows
   * @param {Column<Row>[]} options.columns
   * @param {(row: Row) => string} options.keyOf
   * @param {(row: Row) => string} [options.goTo] address of a row's page
   * @param {{key: string, down: boolean} | null} [options.sorting]
   * @param {(event: KeyboardEvent, row: Row) => boolean} [options.onKey] true: the key was used
   * @param {boolean} [options.tall] rows of several lines
   */
  constructor({ label, columns, keyOf, goTo, sorting = null, onKey, tall = false }) {
    this.#columns = columns;
    this.#keyOf = keyOf;
    this.#goTo = goTo;
    this.#onKey = onKey;
    this.#sorting = sorting;
    const spaceRow = (/** @type {HTMLTableCellElement} */ cell) => {
      cell.colSpan = columns.length;
      return make("tr", { "aria-hidden": "true", class: "space" }, cell);
    };
    this.#table = make(
      "table",
      { class: tall ? "grid tall" : "grid" },
      make("caption", { class: "only-read", text: label }),
      make("colgroup", {}, ...columns.map((each) => this.#col(each))),
      make("thead", {}, this.#head()),
      this.#body,
    );
    const least = columns.reduce((sum, each) => sum + each.width, 0);
    this.#table.style.width = `max(100%, ${least}px)`;
    this.#body.append(spaceRow(this.#above), spaceRow(this.#below));
    this.#scroller = make(
      "div",
      { class: "table-scroll", role: "region", "aria-label": label, tabindex: goTo ? null : "0" },
      this.#table,
    );
    this.element = make("div", { class: "table-frame" }, this.#scroller);
    markEdges(this.#scroller, this.element);
    this.#scroller.addEventListener("scroll", () => this.#soon(), { passive: true });
    this.#body.addEventListener("pointerover", (event) => markCut(event.target));
    this.#body.addEventListener("focusin", (event) => markCut(event.target));
    this.#body.addEventListener("keydown", (event) => this.#key(event));
    this.#body.addEventListener("focusin", (event) => this.#focused(event));
    new ResizeObserver(() => this.#soon()).observe(this.#scroller);
  }

  /** @param {Row[]} rows in the order in which they are shown if nobody sorted them */
  show(rows) {
    const by = this.#columns.find((each) => each.key === this.#sorting?.key)?.sort;
    this.#rows = by ? inOrder(rows, by, this.#keyOf, this.#sorting?.down ?? false) : rows;
    this.#table.setAttribute("aria-rowcount", String(rows.length + 1));
    this.#paint();
  }

  /** Writes the rows anew that can be seen. */
  repaint() {
    this.#paint();
  }

  /** @param {Column<Row>} column */
  #col(column) {
    const col = make("col");
    if (!column.long) col.style.width = `${column.width}px`;
    return col;
  }

  #head() {
    const row = make("tr", { "aria-rowindex": "1" });
    for (const column of this.#columns) {
      const press = column.sort && (() => this.#sortBy(column));
      const sorted = this.#sorting?.key === column.key ? this.#sorting : null;
      row.append(sortHeader(column, sorted, press));
    }
    return row;
  }

  /** @param {Column<Row>} column */
  #sortBy(column) {
    const again = this.#sorting?.key === column.key;
    const down = again ? !this.#sorting?.down : Boolean(column.numeric);
    this.#sorting = { key: column.key, down };
    const at = this.#columns.indexOf(column);
    this.#table.tHead?.replaceChildren(this.#head());
    this.#table.tHead?.rows[0]?.cells[at]?.querySelector("button")?.focus();
    this.show(this.#rows);
  }

  #soon() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#paint());
  }

  #paint() {
    const seen = this.#scroller.clientHeight || FIRST_ROWS * USUAL_HEIGHT;
    const length = this.#rows.length;
    const start = Math.max(0, Math.floor(this.#scroller.scrollTop / this.#height) - SPARE);
    const most = Math.ceil(seen / this.#height) + 2 * SPARE;
    this.#first = Math.min(start, Math.max(0, length - most));
    const number = Math.min(most, length - this.#first);
    const focused = this.#body.contains(document.activeElement);
    this.#above.style.height = `${this.#first * this.#height}px`;
    this.#below.style.height = `${(length - this.#first - number) * this.#height}px`;
    this.#setRowCount(number);
    const visible = this.#rows.slice(this.#first, this.#first + number);
    const tabbed = Math.max(
      0,
      visible.findIndex((row) => this.#keyOf(row) === this.#active),
    );
    visible.forEach((row, at) => {
      this.#write(at, row, at === tabbed);
    });
    const measured = this.#body.rows[1]?.offsetHeight;
    if (number && measured && measured !== this.#height) {
      this.#height = measured;
      this.#soon();
    }
    if (focused && number) this.#focusRow(tabbed);
  }

  /** @param {number} wanted */
  #setRowCount(wanted) {
    const last = this.#below.parentElement;
    while (this.#body.rows.length - 2 > wanted) last?.previousElementSibling?.remove();
    while (this.#body.rows.length - 2 < wanted) {
      const row = make("tr");
      this.#columns.forEach((column, at) => {
        const cell = at ? make("td") : make("th", { scope: "row" });
        if (column.numeric) cell.className = "number";
        if (column.long) cell.className = "long";
        row.append(cell);
      });
      last?.before(row);
    }
  }

  /** @param {number} at @param {Row} row @param {boolean} tabbed */
  #write(at, row, tabbed) {
    const element = this.#body.rows[at + 1];
    if (!element) return;
    element.setAttribute("aria-rowindex", String(this.#first + at + 2));
    element.classList.toggle("even", (this.#first + at) % 2 === 1);
    this.#columns.forEach((column, place) => {
      const cell = element.cells[place];
      if (cell) column.write(cell, row);
    });
    if (!this.#goTo) return;
    const link = element.querySelector("a");
    if (link) link.tabIndex = tabbed ? 0 : -1;
  }

  /** @param {number} at among the rows in the document */
  #focusRow(at) {
    const link = this.#body.rows[at + 1]?.querySelector("a");
    if (link && link !== document.activeElement) link.focus({ preventScroll: true });
  }

  /** @param {FocusEvent} event */
  #focused(event) {
    const at = this.#placeOf(event.target);
    const row = this.#rows[at];
    if (row === undefined || this.#keyOf(row) === this.#active) return;
    this.#active = this.#keyOf(row);
    this.#soon();
  }

  /** @param {EventTarget | null} target @returns {number} among all rows; -1: in none */
  #placeOf(target) {
    const element = target instanceof Element ? target.closest("tr") : null;
    return element ? [...this.#body.rows].indexOf(element) - 1 + this.#first : -1;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const at = this.#placeOf(event.target);
    const row = this.#rows[at];
    if (!this.#goTo || row === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.#scroller.clientHeight / this.#height) - 2);
    const to = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: this.#rows.length - 1,
    }[event.key];
    if (to !== undefined) this.#move(Math.min(this.#rows.length - 1, Math.max(0, to)));
    if (to !== undefined || this.#onKey?.(event, row)) event.preventDefault();
  }

  /** @param {number} at among all rows */
  #move(at) {
    const row = this.#rows[at];
    if (row === undefined) return;
    this.#active = this.#keyOf(row);
    const head = this.#table.tHead?.offsetHeight ?? 0;
    const top = at * this.#height;
    const bottom = top + this.#height + head - this.#scroller.clientHeight;
    if (this.#scroller.scrollTop > top) this.#scroller.scrollTop = top;
    else if (this.#scroller.scrollTop < bottom) this.#scroller.scrollTop = bottom;
    this.#paint();
    this.#focusRow(at - this.#first);
  }
}
