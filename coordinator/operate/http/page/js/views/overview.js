/** A run at a glance: how good the model is, who takes part, what it costs. */

import { fill, make } from "../parts/elements.js";
import { bar } from "../parts/states.js";
import {
  bytes,
  count,
  deployed,
  joules,
  level,
  moment,
  percent,
  plain,
  seconds,
  spaced,
} from "../parts/words.js";
import { accuracyPlot } from "./accuracy.js";

/** @typedef {import("../shapes.js").Status} Status */
/** @typedef {[label: string, value: string, note?: string]} Fact */

const EVENTS_SHOWN = 8;

/** @param {import("./run.js").RunContext} context @returns {import("./run.js").Part} */
export function overviewPart({ run, address }) {
  const figures = make("dl", { class: "figures" });
  const plot = accuracyPlot(run);
  const taking = make("div");
  const levels = make("div");
  const totals = make("dl", { class: "facts" });
  const settings = make("dl", { class: "facts" });
  const events = make("ul", { class: "events" });
  const element = make(
    "div",
    { class: "overview" },
    figures,
    card("Accuracy", plot.element, "wide"),
    make("div", { class: "side" }, card("This round", taking), card("Levels", levels)),
    card("Totals", totals),
    card("Settings", settings),
    card(
      "Events",
      make("div", {}, events, make("a", { href: address("history"), text: "All of the history" })),
    ),
  );

  function paint() {
    const { status } = run;
    if (!status) return;
    plot.paint();
    writeFacts(figures, headFigures(status));
    drawTaking(taking, status);
    drawLevels(levels, status);
    writeFacts(totals, totalFacts(status));
    writeFacts(settings, settingFacts(status));
    const told = run.rounds
      .filter((row) => row.event)
      .slice(-EVENTS_SHOWN)
      .reverse();
    fill(events, told, () =>
      told.length
        ? told.map((row) =>
            make(
              "li",
              {},
              make("span", { class: "quiet", text: `${moment(row.time)}, round ${row.round}: ` }),
              row.event ?? "",
            ),
          )
        : [make("li", { class: "quiet", text: "Nothing but rounds so far." })],
    );
  }
  return { element, paint, close: plot.close };
}

/** @param {string} title @param {HTMLElement} content @param {string} [kind] */
const card = (title, content, kind = "") =>
  make("section", { class: `card ${kind}` }, make("h2", { text: title }), content);

/** @param {HTMLElement} list @param {Fact[]} facts */
export function writeFacts(list, facts) {
  fill(
    list,
    facts.map(([label]) => label),
    () => facts.map(([label]) => make("div", {}, make("dt", { text: label }), make("dd"))),
  );
  facts.forEach(([, value, note], at) => {
    const place = list.children[at]?.lastElementChild;
    if (place)
      fill(place, [value, note], () => [value, note ? make("small", { text: note }) : null]);
  });
}

/** @param {Status} status @returns {Fact[]} */
function headFigures(status) {
  const { best, devices } = status;
  const chosen = deployed(status);
  const bestLevel = typeof best?.level === "number" ? `level ${level(best.level)}, ` : "";
  return [
    [
      "Accuracy to deploy",
      percent(chosen?.accuracy, 1),
      chosen ? `level ${level(chosen.level)}` : "",
    ],
    ["Accuracy, whole model", percent(status.accuracy, 1), "after the newest round"],
    ["Best accuracy", percent(best?.accuracy, 1), best ? `${bestLevel}round ${best.round}` : ""],
    [
      "Present",
      count(devices.present),
      `of ${count(devices.known)} devices; ${count(devices.training)} training`,
    ],
    ["Quarantined", count(devices.quarantined), `${count(devices.paused)} paused by their owners`],
    [
      "Started",
      moment(status.started),
      status.started ? `${seconds(status.time - status.started)} ago` : "",
    ],
  ];
}

/** @param {Status} status @returns {Fact[]} */
function totalFacts({ totals }) {
  return [
    ["Training time", seconds(totals.seconds)],
    ["Energy", joules(totals.joules)],
    ["Sent by devices", bytes(totals.bytes_up)],
    ["Fetched by devices", bytes(totals.bytes_down)],
    ["Movements counted", count(totals.trained)],
    ["Skips", count(totals.skipped)],
    ["Late", count(totals.late)],
    ["Refused", count(totals.rejected)],
  ];
}

/** @param {Status} status @returns {Fact[]} */
function settingFacts(status) {
  return [
    ...Object.entries(status.settings).map(
      ([name, value]) => /** @type {Fact} */ ([name, settingWords(name, value)]),
    ),
    ["folder", status.folder],
    ["version", status.version],
  ];
}

/** @param {string} name @param {unknown} value */
const settingWords = (name, value) =>
  name === "levels" && Array.isArray(value) ? value.map(level).join(", ") : plain(value);

/** @param {HTMLElement} place @param {Status} status */
function drawTaking(place, status) {
  const { levels, skips } = status;
  fill(place, [levels, skips, status.round, status.phase], () => {
    const offered = Object.entries(levels).sort(([one], [other]) => Number(other) - Number(one));
    const skipped = Object.entries(skips).sort(([, one], [, other]) => other - one);
    const most = Math.max(1, ...Object.values(levels), ...Object.values(skips));
    const words = status.phase ? `, ${spaced(status.phase)}` : "";
    return [
      make("p", { class: "quiet", text: `Round ${status.round}${words}` }),
      offered.length || skipped.length
        ? make(
            "ul",
            { class: "tally" },
            ...offered.map(([name, number]) =>
              tally(`level ${level(Number(name))}`, number, most, "good"),
            ),
            ...skipped.map(([name, number]) =>
              tally(`skip: ${spaced(name)}`, number, most, "wait"),
            ),
          )
        : make("p", { class: "quiet", text: "Nobody has answered yet." }),
    ];
  });
}

/** @param {string} label @param {number} number @param {number} most @param {string} tone */
function tally(label, number, most, tone) {
  const shown = bar(label, number / most, count(number));
  shown.classList.add(tone);
  return make(
    "li",
    {},
    make("span", { text: label }),
    shown,
    make("span", { class: "number", text: count(number) }),
  );
}

/** @param {HTMLElement} place @param {Status} status */
function drawLevels(place, status) {
  fill(place, [status.level_reports, status.deploy], () => {
    if (!status.level_reports.length) {
      return [make("p", { class: "quiet", text: "No level has been evaluated yet." })];
    }
    const head = ["Level", "Parameters", "Accuracy", "Devices"];
    const rows = status.level_reports.map((each) => [
      each.level === status.deploy ? `${level(each.level)} (to deploy)` : level(each.level),
      count(each.parameters),
      percent(each.accuracy, 1),
      count(each.devices),
    ]);
    return [plainTable("Levels of the model", head, rows)];
  });
}

/** @param {string} caption @param {string[]} head @param {string[][]} rows */
export function plainTable(caption, head, rows) {
  return make(
    "table",
    { class: "small" },
    make("caption", { class: "only-read", text: caption }),
    make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col", text })))),
    make(
      "tbody",
      {},
      ...rows.map((row) =>
        make(
          "tr",
          {},
          ...row.map((text, at) =>
            at ? make("td", { text }) : make("th", { scope: "row", text }),
          ),
        ),
      ),
    ),
  );
}
