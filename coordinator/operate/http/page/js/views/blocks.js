/** The model as a map of blocks: which parts are covered, remembered, and still moving. */

import { ofRun } from "../live/api.js";
import { Asker } from "../live/asker.js";
import { BlockCanvas } from "../parts/block_canvas.js";
import { MEASURES, scaleOf, wordsOf } from "../parts/block_measures.js";
import { fill, make, setText } from "../parts/elements.js";
import { fail } from "../parts/messages.js";
import { switchOf } from "../parts/switch.js";
import { column, Table } from "../parts/table.js";
import { whenColoursChange } from "../parts/theme.js";
import { count, counted } from "../parts/words.js";

/** @typedef {import("../shapes.js").BlockMap} BlockMap */
/** @typedef {import("../shapes.js").Block} Block */
/** @typedef {import("../shapes.js").Tensor} Tensor */
/** @typedef {import("../parts/block_measures.js").Measure} Measure */
/** @typedef {{tensor: Tensor, block: Block}} Named */

const HINT = "Point at a block, or move to a tensor and press the arrow keys, to read its figures.";

/** @type {Measure} */
let measure = "covered";

/** @param {import("./run.js").RunContext} context @returns {import("./run.js").Part} */
export function blocksPart({ run }) {
  /** @type {BlockMap | null} */
  let map = null;
  const asker = new Asker(ofRun(run.task, "blocks"), (answer) => take(named(answer)), fail);
  const legend = make("div", { class: "scale" });
  const readout = make("p", { class: "readout", "aria-live": "polite" });
  const size = make("p", { class: "quiet" });
  const place = make("div", { class: "tensors" });
  const choice = switchOf(
    "Colour shows",
    MEASURES.map(({ key, label }) => [key, label]),
    measure,
    (value) => {
      measure = value;
      draw();
    },
  );
  /** @type {BlockCanvas[]} */
  let canvases = [];
  const table = blockTable();
  const details = make(
    "details",
    { toggle: () => details.open && fillTable(table, map) },
    make("summary", { text: "The same as a table" }),
    table.element,
  );
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      canvases.find((each) => each.element === entry.target)?.setVisible(entry.isIntersecting);
    }
  });

  const point = (/** @type {Tensor} */ tensor, /** @type {Block | null} */ block) =>
    setText(readout, block ? wordsOf(tensor, block) : HINT);

  /** @param {BlockMap} next */
  function take(next) {
    const names = (/** @type {BlockMap | null} */ each) =>
      JSON.stringify(each?.tensors.map((tensor) => tensor.name));
    const same = names(map) === names(next);
    map = next;
    if (!same) {
      seen.disconnect();
      canvases = next.tensors.map((tensor) => new BlockCanvas(tensor, point));
      place.replaceChildren(...layers(canvases));
      for (const each of canvases) seen.observe(each.element);
    }
    const blocks = next.tensors.reduce((sum, each) => sum + each.blocks.length, 0);
    const parameters = next.tensors.reduce((sum, each) => sum + each.parameters, 0);
    const parts = [
      counted(next.tensors.length, "tensor"),
      counted(blocks, "block"),
      `${count(parameters)} parameters`,
    ];
    setText(size, `Round ${next.round}: ${parts.join(", ")}.`);
    draw();
  }

  function draw() {
    if (!map) return;
    const scale = scaleOf(measure, map);
    fill(legend, [scale.title, scale.steps], () => [
      make("span", { class: "scale-title", text: scale.title }),
      ...scale.steps.map(({ tone, words }) => {
        const sample = make("span", { class: "sample", "aria-hidden": "true" });
        sample.style.background = `var(${tone})`;
        return make("span", { class: "scale-step" }, sample, words);
      }),
    ]);
    map.tensors.forEach((tensor, at) => {
      canvases[at]?.show(tensor, scale);
    });
    if (details.open) fillTable(table, map);
  }

  const ended = whenColoursChange(draw);
  setText(readout, HINT);
  return {
    element: make(
      "div",
      { class: "model" },
      make("div", { class: "model-tools" }, choice, legend, readout),
      size,
      place,
      details,
    ),
    paint: () => asker.ask(run.status?.committed),
    close: () => {
      ended();
      asker.close();
      seen.disconnect();
    },
  };
}

/**
 * A map whose signatures name their axes.
 *
 * @param {BlockMap} map
 */
function named(map) {
  for (const block of map.tensors.flatMap((tensor) => tensor.blocks)) {
    for (const pair of block.signature) {
      if (typeof pair[0] === "number") pair[0] = map.axes[pair[0]]?.name ?? pair[0];
    }
  }
  return map;
}

/**
 * Tensors of one layer stand in one card: those whose names differ in the last part alone.
 *
 * @param {BlockCanvas[]} canvases
 */
function layers(canvases) {
  /** @type {HTMLElement[]} */
  const cards = [];
  let before = "";
  for (const { tensor, element } of canvases) {
    const end = tensor.name.lastIndexOf(".");
    const layer = end < 0 ? tensor.name : tensor.name.slice(0, end);
    if (!cards.length || layer !== before) cards.push(make("div", { class: "card layer" }));
    before = layer;
    cards.at(-1)?.append(element);
  }
  return cards;
}

function blockTable() {
  const numeric = (/** @type {Measure} */ key) => ({
    numeric: true,
    sort: (/** @type {Named} */ row) => row.block[key],
  });
  return new Table({
    label: "Blocks",
    keyOf: (/** @type {Named} */ row) => `${row.tensor.name} ${row.block.id}`,
    columns: [
      column("tensor", "Tensor", 240, (row) => row.tensor.name, { sort: (row) => row.tensor.name }),
      column("groups", "Groups", 200, (/** @type {Named} */ row) =>
        row.block.signature.map((pair) => pair.join(" ")).join(", "),
      ),
      column("parameters", "Parameters", 110, (row) => count(row.block.parameters), {
        numeric: true,
        sort: (row) => row.block.parameters,
      }),
      ...MEASURES.map(({ key, short, word }) =>
        column(key, short, 120, (/** @type {Named} */ row) => word(row.block[key]), numeric(key)),
      ),
    ],
  });
}

/** @param {Table<Named>} table @param {BlockMap | null} map */
function fillTable(table, map) {
  table.show(
    (map?.tensors ?? []).flatMap((tensor) => tensor.blocks.map((block) => ({ tensor, block }))),
  );
}
