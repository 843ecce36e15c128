/** The blocks of one tensor as a grid: rows are groups of its first axis, columns of its second. */

import { make } from "./elements.js";
import { colour } from "./theme.js";
import { count, counted } from "./words.js";

/** @typedef {import("../shapes.js").Block} Block */
/** @typedef {import("../shapes.js").Tensor} Tensor */
/** @typedef {import("./block_measures.js").Scale} Scale */

const LARGEST = 16;
const SMALLEST = 4;
/** Pixels that a grid should not exceed, where its cells need not become too small for that. */
const WIDEST = 264;

export class BlockCanvas {
  element;
  #canvas;
  #point;
  #visible = false;
  #columns = 1;
  #rows = 1;
  #cell = LARGEST;
  /** @type {(Block | undefined)[]} by row and column */
  #grid = [];
  /** @type {Scale | null} */
  #scale = null;
  #at = -1;

  /**
   * @param {Tensor} tensor
   * @param {(tensor: Tensor, block: Block | null) => void} point
   */
  constructor(tensor, point) {
    this.tensor = tensor;
    this.#point = point;
    this.#canvas = make("canvas", {
      role: "img",
      tabindex: "0",
      "aria-label": `${tensor.name}: ${counted(tensor.blocks.length, "block")}`,
      mousemove: (/** @type {MouseEvent} */ event) => this.#hover(event),
      mouseleave: () => this.#choose(-1),
      focus: () => this.#choose(0),
      blur: () => this.#choose(-1),
      keydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
    });
    const shape = tensor.shape.length ? tensor.shape.join(" × ") : "one number";
    this.element = make(
      "figure",
      { class: "tensor" },
      make(
        "figcaption",
        {},
        make("strong", { text: tensor.name, title: tensor.name }),
        make("span", {
          class: "quiet",
          text: `${shape}, ${counted(tensor.blocks.length, "block")}`,
        }),
      ),
      make("div", { class: "tensor-grid" }, this.#canvas),
    );
    this.#arrange();
  }

  /** @param {Tensor} tensor @param {Scale} scale */
  show(tensor, scale) {
    this.tensor = tensor;
    this.#scale = scale;
    this.#arrange();
    if (this.#visible) this.#draw();
  }

  /** Only what can be seen is drawn. @param {boolean} visible */
  setVisible(visible) {
    this.#visible = visible;
    if (visible) this.#draw();
  }

  #arrange() {
    const { blocks } = this.tensor;
    const places = (/** @type {(block: Block) => string | number} */ of) =>
      new Map([...new Set(blocks.map(of))].map((key, at) => [key, at]));
    const deep = blocks.some((block) => block.signature.length > 1);
    const rowOf = (/** @type {Block} */ block) => (deep ? (block.signature[0]?.[1] ?? 0) : 0);
    const columnOf = (/** @type {Block} */ block) =>
      block.signature
        .slice(deep ? 1 : 0)
        .map(([, group]) => group)
        .join(" ");
    const rows = places(rowOf);
    const columns = places(columnOf);
    this.#rows = Math.max(1, rows.size);
    this.#columns = Math.max(1, columns.size);
    this.#grid = new Array(this.#rows * this.#columns);
    for (const block of blocks) {
      const at =
        (rows.get(rowOf(block)) ?? 0) * this.#columns + (columns.get(columnOf(block)) ?? 0);
      this.#grid[at] = block;
    }
    this.#wrap(deep);
    const fit = Math.floor(WIDEST / Math.max(this.#columns, this.#rows));
    this.#cell = Math.max(SMALLEST, Math.min(LARGEST, fit));
    this.#canvas.style.width = `${this.#columns * this.#cell}px`;
    this.#canvas.style.height = `${this.#rows * this.#cell}px`;
  }

  /** A long bar goes on in the next line. @param {boolean} deep */
  #wrap(deep) {
    const most = Math.floor(WIDEST / LARGEST);
    if (deep || this.#columns <= most) return;
    this.#columns = Math.min(
      Math.max(most, Math.ceil(Math.sqrt(2 * this.#grid.length))),
      this.#grid.length,
    );
    this.#rows = Math.ceil(this.#grid.length / this.#columns);
  }

  #draw() {
    const scale = this.#scale;
    const context = this.#canvas.getContext("2d");
    if (!scale || !context) return;
    const ratio = window.devicePixelRatio || 1;
    const cell = this.#cell;
    this.#canvas.width = Math.round(this.#columns * cell * ratio);
    this.#canvas.height = Math.round(this.#rows * cell * ratio);
    context.scale(ratio, ratio);
    const gap = cell > 8 ? 1.5 : cell > 5 ? 1 : 0.5;
    this.#grid.forEach((block, at) => {
      if (!block) return;
      context.fillStyle = colour(scale.toneOf(block));
      const [x, y] = this.#corner(at);
      context.fillRect(x, y, cell - gap, cell - gap);
    });
    if (this.#at < 0) return;
    const [x, y] = this.#corner(this.#at);
    context.strokeStyle = colour("--focus");
    context.lineWidth = 2;
    context.strokeRect(x + 0.5, y + 0.5, cell - gap - 1, cell - gap - 1);
  }

  /** @param {number} at @returns {[number, number]} */
  #corner(at) {
    return [(at % this.#columns) * this.#cell, Math.floor(at / this.#columns) * this.#cell];
  }

  /** @param {MouseEvent} event */
  #hover(event) {
    const x = Math.min(this.#columns - 1, Math.floor(event.offsetX / this.#cell));
    const y = Math.floor(event.offsetY / this.#cell);
    this.#choose(y * this.#columns + x);
  }

  /** @param {number} at */
  #choose(at) {
    const block = this.#grid[at];
    const next = block ? at : -1;
    if (next === this.#at) return;
    this.#at = next;
    this.#draw();
    this.#point(this.tensor, block ?? null);
    // For those who cannot see the line above: the focused picture carries the words, too.
    const words = block ? `block ${count(at + 1)} of ${count(this.#grid.length)}` : "";
    this.#canvas.title = words;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const step = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -this.#columns,
      ArrowDown: this.#columns,
      Home: -this.#at,
      End: this.#grid.length - 1 - this.#at,
    }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = this.#at + step;
    if (this.#grid[next]) this.#choose(next);
  }
}
