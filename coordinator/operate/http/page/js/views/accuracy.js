/** Accuracy, of the model and of each level, against what it took to get there. */

import { make } from "../parts/elements.js";
import { Plot } from "../parts/plot.js";
import { switchOf } from "../parts/switch.js";
import { level, percent } from "../parts/words.js";

/** @typedef {import("../shapes.js").RoundRow} RoundRow */
/** @typedef {"rounds" | "hours" | "joules" | "bytes"} Against */

/** @type {[Against, string][]} */
const CHOICES = [
  ["rounds", "rounds"],
  ["hours", "hours"],
  ["joules", "energy"],
  ["bytes", "traffic"],
];
/** @type {Record<Against, string>} */
const LABELS = {
  rounds: "rounds",
  hours: "hours since the start",
  joules: "kilojoules of all devices",
  bytes: "megabytes, both ways",
};
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 2]];
const COLOURS = 6;

/** @type {Against} */
let against = "rounds";

/** @param {import("../live/watched_run.js").WatchedRun} run */
export function accuracyPlot(run) {
  const plot = new Plot("Accuracy", "No round has been evaluated yet.");
  const choice = switchOf("Against", CHOICES, against, (value) => {
    against = value;
    paint();
  });

  function paint() {
    const rows = run.rounds.filter((row) => !row.event);
    const places = axis(rows, run.status?.started ?? null);
    const evaluated = rows
      .map((row, at) => ({ row, x: places[at] ?? 0 }))
      .filter(
        ({ row }) => row.accuracy !== null || row.levels.some((each) => each.accuracy !== null),
      );
    const kept = evaluated.map((each) => each.row);
    const marks = run.rounds
      .filter((row) => row.event)
      .map((row) => places[rows.findLastIndex((each) => each.round <= row.round)] ?? 0);
    plot.show({
      xLabel: LABELS[against],
      x: evaluated.map((each) => each.x),
      curves: curves(kept),
      marks,
      tick: (value) => percent(value),
    });
  }
  return {
    element: make("div", {}, choice, plot.element),
    paint,
    close: () => plot.close(),
  };
}

/** @param {RoundRow[]} rows */
function curves(rows) {
  const word = (/** @type {number | null} */ value) => percent(value, 1);
  const values = rows.flatMap((row) => row.levels.map((each) => each.level));
  const levels = [...new Set(values)].sort((one, other) => other - one);
  const model = {
    label: "model",
    colour: "--curve-0",
    values: rows.map((row) => row.accuracy),
    word,
  };
  const each = levels.map((value, at) => ({
    label: `level ${level(value)}`,
    colour: `--curve-${1 + (at % (COLOURS - 1))}`,
    dash: DASHES[1 + (at % (DASHES.length - 1))] ?? [],
    values: rows.map((row) => row.levels.find((one) => one.level === value)?.accuracy ?? null),
    word,
  }));
  return [model, ...each];
}

/**
 * Where each round stands on the axis; what is not known adds nothing.
 *
 * @param {RoundRow[]} rows
 * @param {number | null} started
 */
function axis(rows, started) {
  const first = started ?? rows.find((row) => row.time !== null)?.time ?? 0;
  let sum = 0;
  return rows.map((row) => {
    if (against === "rounds") return row.round;
    if (against === "hours")
      sum = row.time === null ? sum : Math.max(sum, (row.time - first) / 3600);
    else if (against === "joules") sum += (row.joules ?? 0) / 1e3;
    else sum += ((row.bytes_up ?? 0) + (row.bytes_down ?? 0)) / 1e6;
    return sum;
  });
}
