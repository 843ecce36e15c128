/** One run: its head, which is always there, and the part of it that the address names. */

import { Painter } from "../live/painter.js";
import { WatchedRun } from "../live/watched_run.js";
import { make, setText } from "../parts/elements.js";
import { markEdges } from "../parts/edges.js";
import { speak } from "../parts/messages.js";
import { bar, writeRunState } from "../parts/states.js";
import { moment, seconds } from "../parts/words.js";
import { auditPart } from "./audit.js";
import { blocksPart } from "./blocks.js";
import { devicePart } from "./device.js";
import { fleetPart } from "./fleet.js";
import { historyPart } from "./history.js";
import { overviewPart } from "./overview.js";
import { progressWords, waitingWords } from "./runs.js";
import { steering } from "./steering.js";
import { stripsPart } from "./strips.js";

/**
 * What the parts of a run are given.
 *
 * @typedef {object} RunContext
 * @property {WatchedRun} run
 * @property {boolean} canSteer
 * @property {(part: string, name?: string) => string} address of a part of this run
 *
 * @typedef {object} Part
 * @property {HTMLElement} element
 * @property {() => void} paint
 * @property {() => void} [close]
 */

/** @type {[key: string, label: string, make: (context: RunContext) => Part][]} */
const PARTS = [
  ["", "Overview", overviewPart],
  ["fleet", "Fleet", fleetPart],
  ["strips", "Strips", stripsPart],
  ["model", "Model", blocksPart],
  ["history", "History", historyPart],
  ["audit", "Audit", auditPart],
];

/**
 * @param {{task: string, rest: string[], canSteer: boolean}} options
 * @returns {import("../main.js").View}
 */
export function runView({ task, rest, canSteer }) {
  const run = new WatchedRun(task, () => painter.soon());
  const address = (/** @type {string} */ part, /** @type {string | undefined} */ name) =>
    ["#/run", encodeURIComponent(task), part, name === undefined ? "" : encodeURIComponent(name)]
      .filter((each) => each)
      .join("/");
  const context = { run, canSteer, address };
  const head = runHead(context);
  const place = make("div", { class: "part" });
  const element = make("section", {}, head.element, place);
  /** @type {Part | null} */
  let part = null;

  const view = {
    element,
    title: task,
    close: () => {
      painter.stop();
      part?.close?.();
      run.close();
    },
    /** @param {string[]} named */
    move: (named) => {
      const [key = "", name] = named;
      const found = PARTS.find(([each]) => each === key) ?? PARTS[0];
      part?.close?.();
      if (key === "device" && name !== undefined) {
        part = devicePart(context, name);
        view.title = `${name} · ${task}`;
      } else {
        part = found?.[2](context) ?? null;
        view.title = `${found?.[1]} · ${task}`;
      }
      head.choose(key === "device" ? "fleet" : (found?.[0] ?? ""));
      place.replaceChildren(...(part ? [part.element] : []));
      painter.now();
      return true;
    },
  };
  const painter = new Painter(() => {
    head.paint();
    // Of a run that is not served, there is nothing to show.
    place.hidden = !run.status;
    if (run.status) part?.paint();
  });
  view.move(rest);
  run.open();
  return view;
}

/** @param {RunContext} context */
function runHead({ run, canSteer, address }) {
  const badge = make("span");
  const progress = make("div", { class: "head-progress" });
  const waits = make("p", { class: "waits" });
  const connection = make("p", { class: "connection", role: "status" });
  const steer = canSteer ? steering(run) : null;
  const runs = make("p", { hidden: true }, make("a", { href: "#/", text: "All runs" }));
  const links = PARTS.map(([key, label]) => make("a", { href: address(key), text: label }));
  const tabs = make("nav", { class: "tabs", "aria-label": "Parts of the run" }, ...links);
  markEdges(tabs);
  const element = make(
    "header",
    { class: "run-head" },
    make(
      "div",
      { class: "head-line" },
      make("h1", { text: run.task }),
      badge,
      progress,
      steer?.element ?? null,
    ),
    waits,
    connection,
    runs,
    tabs,
  );
  let spoken = "";
  let done = "";

  function paint() {
    const { status } = run;
    writeConnection(connection, run);
    const nothing = run.connection === "unknown" && !status;
    for (const each of [waits, tabs]) each.hidden = nothing;
    if (steer) steer.element.hidden = !status;
    runs.hidden = !nothing;
    if (!status) {
      setText(waits, run.connection === "connecting" ? "Connecting …" : "");
      return;
    }
    writeRunState(badge, status.state);
    const words = progressWords(status);
    if (done !== words) {
      done = words;
      const share = status.rounds
        ? bar("Rounds done", status.committed / status.rounds, words)
        : "";
      progress.replaceChildren(make("span", { text: words }), share);
    }
    setText(waits, situation(status, run.now));
    waits.classList.toggle("fault-text", status.state === "failed");
    steer?.paint();
    const said = `${status.task}: ${status.state}, ${words}`;
    if (spoken && spoken !== said) speak(said);
    spoken = said;
  }

  return {
    element,
    paint,
    /** @param {string} key */
    choose: (key) => {
      links.forEach((link, at) => {
        if (PARTS[at]?.[0] === key) {
          link.setAttribute("aria-current", "page");
          requestAnimationFrame(() => link.scrollIntoView({ block: "nearest", inline: "nearest" }));
        } else link.removeAttribute("aria-current");
      });
    },
  };
}

/** @param {HTMLElement} element @param {WatchedRun} run */
function writeConnection(element, run) {
  const broker = run.status?.broker_connected === false && run.connection === "live";
  const lost = run.connection === "lost" || run.connection === "unknown";
  const name = lost || broker ? "connection lost" : "connection";
  if (element.className !== name) element.className = name;
  const since = run.heard ? ` What you see is from ${moment(run.heard)}.` : "";
  let words = "";
  if (run.connection === "lost") words = `Not connected to the coordinator; trying again.${since}`;
  else if (run.connection === "unknown") words = `No run of the task ${run.task} is served here.`;
  else if (broker) words = "The coordinator is not connected to its broker.";
  setText(element, words);
}

/**
 * What goes on, in a sentence.
 *
 * @param {import("../shapes.js").Status} status
 * @param {number} now
 */
function situation(status, now) {
  const said = [];
  const why = waitingWords(status);
  if (status.paused) said.push(`Paused by ${status.paused.by} at ${moment(status.paused.time)}.`);
  if (status.stopping === "round") said.push("Stops after this round.");
  if (status.stopping === "now") said.push("Is stopping now.");
  if (why) said.push(why);
  const left = status.deadline_s === null ? 0 : status.time + status.deadline_s - now;
  if (why && left > 0) said.push(`It goes on in ${seconds(left)} at the latest.`);
  return said.join(" ");
}
