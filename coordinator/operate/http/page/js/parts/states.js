/** States of runs and devices: a sign, a colour and a word each, so that none stands alone. */

import { make, setText } from "./elements.js";
import { percent } from "./words.js";

/** @type {Record<string, [sign: string, tone: string, meaning: string]>} */
const RUN = {
  starting: ["◌", "calm", "the coordinator is starting"],
  waiting: ["◔", "wait", "waits for devices"],
  running: ["●", "good", "a round is going on"],
  paused: ["Ⅱ", "wait", "paused: no new round is opened"],
  stopping: ["◍", "wait", "stops soon"],
  finished: ["✓", "good", "all rounds are done"],
  stopped: ["■", "calm", "not served at present"],
  failed: ["✕", "bad", "is down, although it should be served"],
};

/** @type {Record<string, [sign: string, tone: string, meaning: string]>} */
const DEVICE = {
  training: ["●", "good", "trains now"],
  kept: ["✓", "good", "its movement has arrived"],
  asked: ["◔", "calm", "was asked for a level"],
  idle: ["○", "calm", "present, not asked"],
  skipped: ["–", "wait", "cannot afford this round"],
  paused: ["Ⅱ", "wait", "paused by its owner"],
  quarantined: ["▲", "bad", "its movements are not counted"],
  barred: ["✕", "bad", "may not take part"],
  offline: ["·", "gone", "not connected"],
};

/** In the order in which one looks for them. */
export const DEVICE_STATES = Object.keys(DEVICE);

/** @param {string} state */
export const deviceMeaning = (state) => DEVICE[state]?.[2] ?? state;

/** @param {string} state */
export const deviceRank = (state) => {
  const rank = DEVICE_STATES.indexOf(state);
  return rank < 0 ? DEVICE_STATES.length : rank;
};

/** @param {HTMLElement} badge @param {string} state @param {Record<string, string[]>} table */
function write(badge, state, table) {
  const [sign = "?", tone = "calm", meaning = ""] = table[state] ?? [];
  const name = `badge ${tone}`;
  if (badge.className !== name) badge.className = name;
  if (badge.title !== meaning) badge.title = meaning;
  const [mark, word] = badge.children;
  if (mark && word) {
    setText(mark, sign);
    setText(word, state);
  } else {
    badge.append(
      make("span", { "aria-hidden": "true", text: sign }),
      make("span", { text: state }),
    );
  }
}

/** @param {HTMLElement} badge @param {string} state */
export const writeRunState = (badge, state) => write(badge, state, RUN);

/** @param {HTMLElement} badge @param {string} state */
export const writeDeviceState = (badge, state) => write(badge, state, DEVICE);

/** @param {string} state */
export function runBadge(state) {
  const badge = make("span");
  writeRunState(badge, state);
  return badge;
}

/** @param {string} state */
export function deviceBadge(state) {
  const badge = make("span");
  writeDeviceState(badge, state);
  return badge;
}

/**
 * A bar that fills up.
 *
 * @param {string} label
 * @param {number} share 0..1
 * @param {string} [words]
 */
export function bar(label, share, words = percent(share)) {
  const inside = make("span", { class: "bar-inside" });
  inside.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return make(
    "span",
    {
      class: "bar",
      role: "progressbar",
      "aria-label": label,
      "aria-valuemin": "0",
      "aria-valuemax": "100",
      "aria-valuenow": String(Math.round(share * 100)),
      "aria-valuetext": words,
    },
    inside,
  );
}
