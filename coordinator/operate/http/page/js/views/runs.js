/** All runs of this coordinator, one line each. */

import { Refused, read } from "../live/api.js";
import { fill, make } from "../parts/elements.js";
import { bar, runBadge } from "../parts/states.js";
import { count, counted, deployed, level, percent } from "../parts/words.js";

/** @typedef {import("../shapes.js").Status} Status */

const EVERY_MS = 3000;

/** @returns {import("../main.js").View} */
export function runsView() {
  const list = make("ul", { class: "runs" });
  const note = make("p", { class: "connection lost", role: "status", hidden: true });
  const element = make("section", {}, make("h1", { text: "Runs" }), note, list);
  let timer = 0;
  let closed = false;

  async function look() {
    try {
      if (!document.hidden) draw(list, await read("/runs"));
      note.hidden = true;
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return;
      note.textContent = `Not connected: ${error instanceof Error ? error.message : error}`;
      note.hidden = false;
    }
    if (!closed) timer = window.setTimeout(look, EVERY_MS);
  }
  look();

  return {
    element,
    title: "Runs",
    close: () => {
      closed = true;
      window.clearTimeout(timer);
    },
  };
}

/** @param {HTMLElement} list @param {Status[]} runs */
function draw(list, runs) {
  if (!runs.length) {
    fill(list, [], () => [make("li", { class: "quiet", text: "No run is served at present." })]);
    return;
  }
  while (list.childElementCount > runs.length) list.lastElementChild?.remove();
  runs.forEach((run, at) => {
    const item = list.children[at] ?? list.appendChild(make("li"));
    const { sequence: _, time: __, ...shown } = run;
    fill(item, shown, () => [line(run)]);
  });
}

/** @param {Status} run */
function line(run) {
  const { known, present, training } = run.devices;
  return make(
    "a",
    { class: "card run-line", href: `#/run/${encodeURIComponent(run.task)}` },
    make("span", { class: "run-name" }, make("strong", { text: run.task }), runBadge(run.state)),
    make(
      "span",
      { class: "run-progress" },
      make("span", { text: progressWords(run) }),
      run.rounds ? bar("Rounds done", run.committed / run.rounds) : null,
    ),
    accuracyFigure(run),
    figure("Devices", `${count(present)} of ${count(known)}`),
    figure("Training", count(training)),
    make("span", {
      class: `run-waits ${run.state === "failed" ? "fault-text" : "quiet"}`,
      text: waitingWords(run),
    }),
  );
}

/** Why a run does not go on, in a sentence; of a pause, its state says enough. @param {Status} run */
export function waitingWords({ state, waits_for, paused }) {
  if (!waits_for || (paused && waits_for.startsWith("paused"))) return "";
  const end = /[.!?…]$/.test(waits_for) ? "" : ".";
  return state === "failed" ? `Is down: ${waits_for}${end}` : `Waits for ${waits_for}${end}`;
}

/** @param {Status} run */
export function progressWords(run) {
  const what = run.asynchronous ? "update" : "round";
  if (!run.rounds) return counted(run.committed, what);
  return `${count(run.committed)} of ${counted(run.rounds, what)}`;
}

/** Of the level to deploy, if there is one yet. @param {Status} run */
function accuracyFigure(run) {
  const chosen = deployed(run);
  if (!chosen) return figure("Accuracy", percent(run.accuracy, 1));
  return figure(`Accuracy, level ${level(chosen.level)}`, percent(chosen.accuracy, 1));
}

/** @param {string} label @param {string} value */
const figure = (label, value) =>
  make("span", { class: "run-figure" }, make("span", { class: "quiet", text: label }), " ", value);
