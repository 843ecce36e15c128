/** What an operator can do about a device. */

import { askFor } from "../parts/dialogs.js";
import { fill, make } from "../parts/elements.js";
import { order } from "./steering.js";

/** @typedef {import("../shapes.js").DeviceRow} DeviceRow */

/**
 * @param {import("../live/watched_run.js").WatchedRun} run
 * @param {string} name
 */
export function deviceButtons(run, name) {
  const element = make("div", {
    class: "steering",
    role: "group",
    "aria-label": "Steer the device",
  });
  const path = (/** @type {string} */ what) => `devices/${encodeURIComponent(name)}/${what}`;

  const quarantine = () =>
    askFor(
      {
        title: `Quarantine ${name}?`,
        text: "Its movements are no longer counted until it is allowed again.",
        verb: "Quarantine",
        fields: [{ name: "reason", label: "Reason", kind: "text", hint: "Kept in the audit." }],
      },
      (values) =>
        order(run, path("quarantine"), { reason: values["reason"] }, `${name} is in quarantine.`),
    );
  const allow = () =>
    askFor(
      {
        title: `Allow ${name}?`,
        text: "It is asked again from the next round on, and its movements count.",
        verb: "Allow",
      },
      () => order(run, path("allow"), {}, `${name} is allowed again.`),
    );
  const forget = () =>
    askFor(
      {
        title: `Forget ${name}?`,
        text: "What the run remembers of this device's movements is deleted. This cannot be undone.",
        verb: "Forget",
        danger: true,
      },
      () => order(run, path("forget"), {}, `${name} is forgotten.`),
    );

  return {
    element,
    /** @param {DeviceRow} row */
    paint: (row) => {
      fill(element, row.quarantined !== null, () => [
        row.quarantined
          ? make("button", { type: "button", text: "Allow …", click: allow })
          : make("button", { type: "button", text: "Quarantine …", click: quarantine }),
        make("button", { type: "button", text: "Forget …", click: forget }),
      ]);
    },
  };
}
