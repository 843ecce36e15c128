/** Strips of rounds, drawn: a cell for each, with a sign in it, so that colour is not alone. */

import { make } from "./elements.js";
import { colour } from "./theme.js";

export const CELL_WIDTH = 14;
const CELL_HEIGHT = 20;
/** The sign of a round in which a device was not asked. */
export const NOTHING = ".";

/** @param {string} sign @returns {[fill: string, ink: string]} custom properties of the theme */
function tones(sign) {
  if (sign >= "1" && sign <= "9") return [`--level-${sign}`, sign >= "5" ? "--level-ink" : "--ink"];
  if (sign === "l") return ["--strip-late", "--strip-ink"];
  if (sign === "r") return ["--strip-refused", "--strip-ink"];
  if (sign === "o") return ["--strip-silent", "--ink"];
  return ["--strip-skip", "--ink"];
}

/** @param {MouseEvent} event @returns {number} the place of the cell that it points at */
export const cellAt = (event) => Math.floor(event.offsetX / CELL_WIDTH);

/**
 * @param {HTMLCanvasElement} canvas
 * @param {string} text a sign for each round
 * @param {number} rounds
 * @param {number} pointed a place, or -1
 */
export function drawStrip(canvas, text, rounds, pointed) {
  const ratio = window.devicePixelRatio || 1;
  const key = `${text} ${rounds} ${pointed} ${ratio} ${colour("--ink")}`;
  if (canvas.dataset["drawn"] === key) return;
  canvas.dataset["drawn"] = key;
  const width = Math.max(1, rounds) * CELL_WIDTH;
  canvas.width = width * ratio;
  canvas.height = CELL_HEIGHT * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${CELL_HEIGHT}px`;
  const context = canvas.getContext("2d");
  if (!context) return;
  context.scale(ratio, ratio);
  context.font = "600 11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  [...text].forEach((sign, at) => {
    drawCell(context, sign, at * CELL_WIDTH);
  });
  if (pointed < 0) return;
  context.strokeStyle = colour("--focus");
  context.lineWidth = 2;
  context.strokeRect(pointed * CELL_WIDTH + 0.5, 1, CELL_WIDTH - 2, CELL_HEIGHT - 2);
}

/** @param {CanvasRenderingContext2D} context @param {string} sign @param {number} x */
function drawCell(context, sign, x) {
  const middle = x + (CELL_WIDTH - 1) / 2;
  if (sign === NOTHING) {
    context.fillStyle = colour("--line-strong");
    context.fillRect(middle - 1, CELL_HEIGHT / 2 - 1, 2, 2);
    return;
  }
  const [fill, ink] = tones(sign);
  context.fillStyle = colour(fill);
  context.beginPath();
  context.roundRect(x, 1, CELL_WIDTH - 1.5, CELL_HEIGHT - 2, 2);
  context.fill();
  context.fillStyle = colour(ink);
  context.fillText(sign, middle, CELL_HEIGHT / 2 + 0.5);
}

/** @param {string} sign */
export function legendCell(sign) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  drawStrip(canvas, sign, 1, -1);
  return canvas;
}
