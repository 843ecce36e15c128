/** The first view: a token, please. */

import { make } from "../parts/elements.js";

/**
 * @param {(token: string) => Promise<void>} enter
 * @returns {import("../main.js").View}
 */
export function signInView(enter) {
  const fault = make("p", { class: "fault-text", role: "alert", id: "token-fault" });
  const input = make("input", {
    id: "token",
    type: "password",
    autocomplete: "current-password",
    required: true,
    "aria-describedby": "token-hint token-fault",
  });
  const button = make("button", { type: "submit", class: "primary", text: "Sign in" });
  const form = make(
    "form",
    {
      class: "card sign-in",
      submit: async (/** @type {Event} */ event) => {
        event.preventDefault();
        button.disabled = true;
        fault.textContent = "";
        try {
          await enter(input.value.trim());
        } catch (error) {
          fault.textContent = error instanceof Error ? error.message : String(error);
          input.setAttribute("aria-invalid", "true");
          input.focus();
          input.select();
        } finally {
          button.disabled = false;
        }
      },
    },
    make("h1", { text: "Sign in" }),
    make("label", { for: "token", text: "Token" }),
    input,
    make("p", {
      class: "quiet",
      id: "token-hint",
      text: "The coordinator prints it when it starts, or keeps it in a file that its run file names.",
    }),
    fault,
    button,
  );
  return { element: form, title: "Sign in", close: () => {} };
}
