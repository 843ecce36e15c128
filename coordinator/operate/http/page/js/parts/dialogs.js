/** Questions before something is done, in the browser's own dialog. */

import { make } from "./elements.js";

/**
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {"number" | "text" | "choice"} kind
 * @property {string} [value]
 * @property {string} [hint]
 * @property {number} [least] of a whole number
 * @property {[string, string][]} [choices] values and their words
 * @property {boolean} [optional]
 *
 * @typedef {object} Question
 * @property {string} title
 * @property {string} text what will happen
 * @property {string} verb on the button that does it
 * @property {boolean} [danger] it cannot be undone
 * @property {Field[]} [fields]
 */

let asked = 0;

/**
 * Asks, and does what is asked for; a refusal is shown in the dialog, which then stays.
 *
 * @param {Question} question
 * @param {(values: Record<string, string>) => Promise<unknown>} perform
 * @returns {Promise<boolean>} whether it was done
 */
export function askFor(question, perform) {
  asked += 1;
  const titleId = `question-${asked}`;
  const fault = make("p", { class: "fault-text", role: "alert" });
  const inputs = (question.fields ?? []).map((each) => field(each, `${titleId}-${each.name}`));
  const cancel = make("button", { type: "button", text: "Cancel" });
  const confirm = make("button", {
    type: "submit",
    class: question.danger ? "danger" : "primary",
    text: question.verb,
  });
  const form = make(
    "form",
    { method: "dialog" },
    make("h2", { id: titleId, text: question.title }),
    make("p", { id: `${titleId}-text`, text: question.text }),
    ...inputs.map((each) => each.element),
    fault,
    make("div", { class: "dialog-buttons" }, cancel, confirm),
  );
  const dialog = make(
    "dialog",
    { "aria-labelledby": titleId, "aria-describedby": `${titleId}-text` },
    form,
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    let done = false;
    cancel.addEventListener("click", () => dialog.close());
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      confirm.disabled = true;
      fault.textContent = "";
      try {
        await perform(Object.fromEntries(inputs.map((each) => [each.name, each.read()])));
        done = true;
        dialog.close();
      } catch (error) {
        fault.textContent = error instanceof Error ? error.message : String(error);
        confirm.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(done);
    });
    dialog.showModal();
    // What cannot be undone is not one careless Enter away.
    (inputs[0]?.input ?? (question.danger ? cancel : confirm)).focus();
  });
}

/** @param {Field} field @param {string} id */
function field(field, id) {
  const input = field.kind === "choice" ? choice(field, id) : entry(field, id);
  return {
    name: field.name,
    input,
    read: () => input.value,
    element: make(
      "div",
      { class: "field" },
      make("label", { for: id, text: field.label }),
      input,
      field.hint ? make("p", { class: "quiet", id: `${id}-hint`, text: field.hint }) : null,
    ),
  };
}

/** @param {Field} field @param {string} id */
function entry(field, id) {
  return make("input", {
    id,
    type: field.kind,
    value: field.value ?? "",
    required: !field.optional,
    min: field.least,
    step: field.kind === "number" ? "1" : null,
    autocomplete: "off",
    "aria-describedby": field.hint ? `${id}-hint` : null,
  });
}

/** @param {Field} field @param {string} id */
function choice(field, id) {
  return make(
    "select",
    { id, "aria-describedby": field.hint ? `${id}-hint` : null },
    ...(field.choices ?? []).map(([value, text]) =>
      make("option", { value, text, selected: value === field.value }),
    ),
  );
}
