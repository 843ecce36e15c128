/** Short messages: shown for a while, and spoken by screen readers. */

import { make } from "./elements.js";

const SHOWN_MS = 6000;
const FAULT_SHOWN_MS = 15000;
const REMEMBERED = 5;

/** @param {string} id */
const place = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** @param {string} text @param {string} kind @param {number} shown_ms */
function show(text, kind, shown_ms) {
  const message = make(
    "div",
    { class: `message ${kind}` },
    make("span", { text }),
    make("button", {
      type: "button",
      class: "plain",
      "aria-label": "Close this message",
      text: "×",
      click: () => message.remove(),
    }),
  );
  place("messages").append(message);
  window.setTimeout(() => message.remove(), shown_ms);
}

/** @param {string} text what has been done */
export const tell = (text) => show(text, "done", SHOWN_MS);

/** @param {unknown} error what went wrong, in words */
export const fail = (error) =>
  show(error instanceof Error ? error.message : String(error), "fault", FAULT_SHOWN_MS);

/**
 * Says a change to those who listen.
 *
 * @param {string} text
 */
export function speak(text) {
  const log = place("spoken");
  log.append(make("p", { text }));
  while (log.childElementCount > REMEMBERED) log.firstElementChild?.remove();
}
