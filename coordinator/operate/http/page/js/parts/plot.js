/** Curves, drawn by uPlot, with a legend that shows values and switches curves on and off. */

import uPlot from "../../uplot/uPlot.esm.js";
import { fill, make, setText } from "./elements.js";
import { colour, whenColoursChange } from "./theme.js";
import { number, UNKNOWN } from "./words.js";

/**
 * @typedef {object} Curve
 * @property {string} label
 * @property {(number | null)[]} values
 * @property {string} colour a custom property of the theme
 * @property {number[]} [dash]
 * @property {boolean} [points] points instead of a line
 * @property {boolean} [right] measured on the axis at the right
 * @property {(value: number | null) => string} [word]
 *
 * @typedef {object} Picture
 * @property {string} xLabel
 * @property {number[]} x
 * @property {Curve[]} curves
 * @property {number[]} [marks] where vertical lines stand
 * @property {(value: number) => string} [tick] words at the axis on the left
 * @property {{range: [number, number], tick: (value: number) => string}} [right] the axis at the
 *   right, if it does not follow from the values
 */

const HEIGHT = 280;
const NARROW = 480;
/** So many values are shown as points, too. */
const FEW = 12;

export class Plot {
  element;
  #place = make("div", { class: "plot-place" });
  #legend = make("div", { class: "plot-legend", role: "group", "aria-label": "Curves" });
  /** @type {HTMLElement[]} */
  #values = [];
  /** @type {uPlot | null} */
  #plot = null;
  /** @type {Picture | null} */
  #picture = null;
  #shape = "";
  /** @type {Set<string>} */
  #hidden = new Set();
  #ended;
  #observer;

  /** @param {string} label what is plotted @param {string} empty words while there is nothing */
  constructor(label, empty) {
    this.empty = empty;
    this.label = label;
    this.element = make("div", { class: "plot" }, this.#place, this.#legend);
    this.#ended = whenColoursChange(() => this.#make());
    this.#observer = new ResizeObserver(() => this.#resize());
    this.#observer.observe(this.#place);
  }

  close() {
    this.#ended();
    this.#observer.disconnect();
    this.#plot?.destroy();
    this.#plot = null;
  }

  /** @param {Picture} picture */
  show(picture) {
    const { xLabel, curves } = picture;
    const looks = curves.map(({ values: _, ...look }) => look);
    const shape = JSON.stringify([xLabel, looks, picture.x.length > 0]);
    this.#picture = picture;
    if (shape !== this.#shape) {
      this.#shape = shape;
      this.#make();
    } else this.#plot?.setData(this.#data(picture));
    this.#tellValues(null);
    this.#describe(picture);
  }

  /** @param {Picture} picture */
  #describe(picture) {
    const last = picture.curves.map((each) => `${each.label} ${this.#word(each, null)}`);
    this.#place.setAttribute("role", "img");
    this.#place.setAttribute(
      "aria-label",
      `${this.label} against ${picture.xLabel}. Newest: ${last.join(", ") || "nothing yet"}.`,
    );
  }

  /** @param {Picture} picture @returns {uPlot.AlignedData} */
  #data(picture) {
    return /** @type {uPlot.AlignedData} */ ([
      picture.x,
      ...picture.curves.map((each) => each.values),
    ]);
  }

  #make() {
    this.#plot?.destroy();
    this.#plot = null;
    const picture = this.#picture;
    if (!picture) return;
    this.#place.replaceChildren();
    if (picture.x.length === 0) {
      this.#place.append(make("p", { class: "quiet plot-empty", text: this.empty }));
      this.#legend.replaceChildren();
      this.#values = [];
      return;
    }
    this.#plot = new uPlot(this.#options(picture), this.#data(picture), this.#place);
    this.#writeLegend(picture.curves);
  }

  /** @param {Picture} picture @returns {uPlot.Options} */
  #options(picture) {
    const width = this.#place.clientWidth || NARROW;
    const axis = {
      stroke: colour("--quiet"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
    };
    const right = picture.curves.some((each) => each.right);
    const { range = padded, tick = number } = picture.right ?? {};
    const atRight = {
      ...axis,
      scale: "right",
      side: 1,
      size: 52,
      grid: { show: false },
      values: (/** @type {uPlot} */ _, /** @type {number[]} */ ticks) => ticks.map(tick),
    };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: { range: padded }, right: { range } },
      series: [{}, ...picture.curves.map((each) => this.#series(each))],
      axes: [
        { ...axis, label: picture.xLabel, labelSize: 22, size: 34 },
        { ...axis, size: 52, values: (_, ticks) => ticks.map(picture.tick ?? number) },
        ...(right ? [atRight] : []),
      ],
      hooks: {
        setCursor: [(plot) => this.#tellValues(plot.cursor.idx ?? null)],
        drawAxes: [(plot) => drawMarks(plot, this.#picture?.marks ?? [])],
      },
    };
  }

  /** @param {Curve} curve @returns {uPlot.Series} */
  #series(curve) {
    const stroke = colour(curve.colour);
    return {
      label: curve.label,
      scale: curve.right ? "right" : "y",
      stroke,
      width: curve.points ? 0 : 2,
      ...(curve.dash ? { dash: curve.dash } : {}),
      points: curve.points
        ? { show: true, size: 7, fill: stroke }
        : { show: few, size: 6, fill: stroke, filter: () => null },
      show: !this.#hidden.has(curve.label),
      spanGaps: true,
    };
  }

  #resize() {
    const width = this.#place.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) {
      this.#plot.setSize({ width, height: HEIGHT });
    }
  }

  /** @param {Curve[]} curves */
  #writeLegend(curves) {
    this.#values = curves.map(() => make("span", { class: "value" }));
    fill(this.#legend, [this.#shape, colour("--ink")], () =>
      curves.map((curve, at) => {
        const button = make(
          "button",
          {
            type: "button",
            class: "curve",
            "aria-pressed": String(!this.#hidden.has(curve.label)),
            click: () => this.#toggle(curve.label, at, button),
          },
          swatch(curve),
          `${curve.label} `,
          this.#values[at],
        );
        return button;
      }),
    );
  }

  /** @param {string} label @param {number} at @param {HTMLElement} button */
  #toggle(label, at, button) {
    const show = this.#hidden.delete(label);
    if (!show) this.#hidden.add(label);
    button.setAttribute("aria-pressed", String(show));
    this.#plot?.setSeries(at + 1, { show });
  }

  /** @param {number | null} at null: the newest values */
  #tellValues(at) {
    this.#picture?.curves.forEach((curve, place) => {
      const element = this.#values[place];
      if (element) setText(element, this.#word(curve, at));
    });
  }

  /** @param {Curve} curve @param {number | null} at */
  #word(curve, at) {
    const value = at === null ? curve.values.findLast((each) => each !== null) : curve.values[at];
    if (value === undefined || value === null) return UNKNOWN;
    return curve.word ? curve.word(value) : number(value);
  }
}

/** @param {uPlot} plot */
const few = (plot) => (plot.data[0]?.length ?? 0) <= FEW;

/**
 * A range with some room above and below.
 *
 * @param {uPlot} _ @param {number | null} low @param {number | null} high
 * @returns {[number, number]}
 */
function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

/** @param {uPlot} plot @param {number[]} marks */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = colour("--quiet");
  ctx.setLineDash([2, 4]);
  ctx.beginPath();
  for (const each of marks) {
    const x = plot.valToPos(each, "x", true);
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
}

/** @param {Curve} curve */
function swatch(curve) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = make("canvas", { class: "swatch", "aria-hidden": "true" });
  canvas.width = 22 * ratio;
  canvas.height = 10 * ratio;
  const context = canvas.getContext("2d");
  if (!context) return canvas;
  context.scale(ratio, ratio);
  context.strokeStyle = colour(curve.colour);
  context.fillStyle = colour(curve.colour);
  context.lineWidth = 2.5;
  context.setLineDash(curve.dash ?? []);
  context.beginPath();
  if (curve.points) {
    context.arc(11, 5, 4, 0, 2 * Math.PI);
    context.fill();
  } else {
    context.moveTo(0, 5);
    context.lineTo(22, 5);
    context.stroke();
  }
  return canvas;
}
