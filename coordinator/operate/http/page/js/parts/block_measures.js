/** Measures of a block, and the colours that stand for their values. */

import { count, counted, number } from "./words.js";

/** @typedef {"covered" | "age" | "memory_age" | "movement"} Measure */
/** @typedef {import("../shapes.js").Block} Block */

/** @type {{key: Measure, label: string, short: string, title: string, word: (value: number | null) => string}[]} */
export const MEASURES = [
  { key: "covered", label: "coverage", short: "Covered", title: "Times trained", word: count },
  { key: "age", label: "age", short: "Age", title: "Rounds since it was trained", word: count },
  {
    key: "memory_age",
    label: "memory",
    short: "Memory age",
    title: "Rounds since its newest remembered movement",
    word: count,
  },
  {
    key: "movement",
    label: "movement",
    short: "Movement",
    title: "Size of its last step (RMS)",
    word: number,
  },
];

/**
 * @typedef {object} Scale
 * @property {string} title
 * @property {{tone: string, words: string}[]} steps
 * @property {(block: Block) => string} toneOf a custom property of the theme
 */

/** Colours of the theme from little to much: `--heat-0` … */
const STEPS = 6;
const UNKNOWN_TONE = "--heat-unknown";

/**
 * @param {Measure} measure
 * @param {import("../shapes.js").BlockMap} map
 * @returns {Scale}
 */
export function scaleOf(measure, map) {
  const found = MEASURES.find((each) => each.key === measure);
  const blocks = map.tensors.flatMap((tensor) => tensor.blocks);
  const values = blocks.map((block) => block[measure]).filter((value) => value !== null);
  const bounds = measure === "movement" ? magnitudes(values) : equal(values);
  const word = found?.word ?? number;
  const toneOf = (/** @type {Block} */ block) => {
    const value = block[measure];
    if (value === null) return UNKNOWN_TONE;
    const at = bounds.findIndex(([, high]) => value <= high);
    return tone(at < 0 ? bounds.length - 1 : at, bounds.length);
  };
  const steps = bounds.map(([low, high], at) => ({
    tone: tone(at, bounds.length),
    words: word(low) === word(high) ? word(low) : `${word(low)} – ${word(high)}`,
  }));
  if (values.length < blocks.length) steps.push({ tone: UNKNOWN_TONE, words: "none" });
  return { title: found?.title ?? "", steps, toneOf };
}

/** @param {number} at @param {number} of */
const tone = (at, of) => `--heat-${of < 2 ? STEPS - 1 : Math.round((at / (of - 1)) * (STEPS - 1))}`;

/**
 * Steps of equal size over whole numbers.
 *
 * @param {number[]} values
 * @returns {[number, number][]}
 */
function equal(values) {
  if (!values.length) return [];
  const low = values.reduce((one, other) => Math.min(one, other));
  const high = values.reduce((one, other) => Math.max(one, other));
  const width = Math.max(1, Math.ceil((high - low + 1) / STEPS));
  /** @type {[number, number][]} */
  const bounds = [];
  for (let from = low; from <= high; from += width)
    bounds.push([from, Math.min(high, from + width - 1)]);
  return bounds;
}

/**
 * Steps with equally many values in each: sizes of movements differ by magnitudes.
 *
 * @param {number[]} values
 * @returns {[number, number][]}
 */
function magnitudes(values) {
  const sorted = [...new Set(values)].sort((one, other) => one - other);
  const steps = Math.min(STEPS, sorted.length);
  return Array.from({ length: steps }, (_, at) => {
    const from = Math.floor((at * sorted.length) / steps);
    const to = Math.floor(((at + 1) * sorted.length) / steps) - 1;
    return /** @type {[number, number]} */ ([sorted[from] ?? 0, sorted[to] ?? 0]);
  });
}

/**
 * All figures of a block, in words.
 *
 * @param {import("../shapes.js").Tensor} tensor
 * @param {Block} block
 */
export function wordsOf(tensor, block) {
  const groups = block.signature.map(([axis, group]) => `${axis} ${group}`).join(", ");
  const said = [
    `${counted(block.parameters, "parameter")}`,
    `trained ${counted(block.covered ?? 0, "time")}`,
    block.age === null ? "never trained" : `last ${counted(block.age, "round")} ago`,
    block.memory_age === null
      ? "no memory"
      : `newest memory ${counted(block.memory_age, "round")} old`,
    block.movement === null ? null : `last step ${number(block.movement)}`,
  ];
  return `${tensor.name}${groups && `, ${groups}`}: ${said.filter((each) => each).join(", ")}.`;
}
