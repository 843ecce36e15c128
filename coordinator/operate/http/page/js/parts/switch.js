/** A choice of one of a few, as buttons that stand side by side. */

import { make } from "./elements.js";

let made = 0;

/**
 * Radio buttons, so that arrow keys and screen readers work as they do everywhere.
 *
 * @template {string} Value
 * @param {string} label what is chosen
 * @param {[Value, string][]} choices values and their words
 * @param {Value} chosen
 * @param {(value: Value) => void} choose
 */
export function switchOf(label, choices, chosen, choose) {
  made += 1;
  const name = `switch-${made}`;
  return make(
    "fieldset",
    { class: "switch" },
    make("legend", { text: label }),
    ...choices.map(([value, text]) =>
      make(
        "label",
        {},
        make("input", {
          type: "radio",
          name,
          value,
          checked: value === chosen,
          change: () => choose(value),
        }),
        make("span", { text }),
      ),
    ),
  );
}
