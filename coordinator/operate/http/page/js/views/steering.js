/** Buttons that steer a run, each with what it asks before. */

import { ofRun, send } from "../live/api.js";
import { askFor } from "../parts/dialogs.js";
import { fill, make } from "../parts/elements.js";
import { fail, tell } from "../parts/messages.js";
import { plain } from "../parts/words.js";

/** @typedef {import("../live/watched_run.js").WatchedRun} WatchedRun */

/** Settings that hold for a whole run; of others, the coordinator says itself what cannot be. */
const FIXED = new Set(["batch_size", "seed", "rounds", "updates"]);
const ENDED = ["finished", "stopped", "failed"];

/** @param {WatchedRun} run */
export function steering(run) {
  const element = make("div", { class: "steering", role: "group", "aria-label": "Steer the run" });

  function paint() {
    const { status } = run;
    if (!status) return;
    const paused = status.paused !== null || status.state === "paused";
    const ended = ENDED.includes(status.state);
    const had = element.contains(document.activeElement)
      ? [...element.children].indexOf(/** @type {Element} */ (document.activeElement))
      : -1;
    fill(element, [paused, ended, status.stopping], () => [
      !ended && !status.stopping && (paused ? resume(run) : pause(run)),
      !ended && status.stopping !== "now" && button("Stop …", () => stop(run)),
      !status.asynchronous && button("Add rounds …", () => addRounds(run)),
      !ended && button("Change a setting …", () => change(run)),
    ]);
    if (had >= 0 && !element.contains(document.activeElement)) {
      /** @type {HTMLElement | undefined} */ (element.children[had])?.focus();
    }
  }
  return { element, paint };
}

/** @param {string} text @param {() => void} click @param {string} [kind] */
const button = (text, click, kind = "") =>
  make("button", { type: "button", class: kind, text, click });

/**
 * Sends an order, and says how it went.
 *
 * @param {WatchedRun} run @param {string} path below the run @param {unknown} body
 * @param {string} done
 */
export async function order(run, path, body, done) {
  await send(ofRun(run.task, path), body);
  tell(done);
  await run.refresh().catch(fail);
}

/** @param {WatchedRun} run */
function pause(run) {
  return button("Pause", () => {
    order(run, "pause", {}, "Paused: no new round is opened.").catch(fail);
  });
}

/** @param {WatchedRun} run */
function resume(run) {
  return button("Resume", () => order(run, "resume", {}, "Resumed.").catch(fail), "primary");
}

/** @param {WatchedRun} run */
function stop(run) {
  askFor(
    {
      title: `Stop ${run.task}?`,
      text: "The coordinator ends this run. Nothing that was received is lost: started again, it goes on.",
      verb: "Stop",
      danger: true,
      fields: [
        {
          name: "when",
          label: "When",
          kind: "choice",
          value: "round",
          choices: [
            ["round", "after this round"],
            ["now", "now; the open round is resumed at the next start"],
          ],
        },
      ],
    },
    (values) => order(run, "stop", { when: values["when"] }, "The run is told to stop."),
  );
}

/** @param {WatchedRun} run */
function addRounds(run) {
  askFor(
    {
      title: "Add rounds",
      text: `The run has ${plain(run.status?.rounds)} rounds. It goes on for so many more.`,
      verb: "Add",
      fields: [{ name: "add", label: "Rounds", kind: "number", value: "20", least: 1 }],
    },
    (values) =>
      order(run, "rounds", { add: Number(values["add"]) }, `${values["add"]} rounds added.`),
  );
}

/** @param {WatchedRun} run */
function change(run) {
  const settings = Object.entries(run.status?.settings ?? {}).filter(
    ([name, value]) => typeof value === "number" && !FIXED.has(name),
  );
  askFor(
    {
      title: "Change a setting",
      text: "It holds from the next round on, and is written into the run's history.",
      verb: "Change",
      fields: [
        {
          name: "name",
          label: "Setting",
          kind: "choice",
          choices: settings.map(([name, value]) => [name, `${name} (now ${plain(value)})`]),
          value: "learning_rate",
        },
        { name: "value", label: "New value", kind: "text" },
      ],
    },
    (values) => {
      const value = Number(String(values["value"]).replace(",", "."));
      if (!Number.isFinite(value)) throw new Error(`${values["value"]} is not a number.`);
      const name = values["name"] ?? "";
      return order(
        run,
        "settings",
        { name, value },
        `${name} is ${value} from the next round on.`,
      );
    },
  );
}
