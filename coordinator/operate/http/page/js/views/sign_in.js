/** The first view: a token, please. */

import { make } from "../parts/elements.js";

const PRINTS_LINK = "tessera-coordinator page RUN";

/**
 * @param {(token: string) => Promise<void>} enter
 * @param {boolean} staleLink a link led here that signs in no more
 * @returns {import("../main.js").View}
 */
export function signInView(enter, staleLink = false) {
  const fault = make("p", { class: "fault-text", role: "alert", id: "token-fault" });
  const stale = make(
    "p",
    { class: "stale-link", role: "alert" },
    "This link was used, or is too old: ",
    make("code", { text: PRINTS_LINK }),
    " prints another.",
  );
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
        stale.remove();
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
    staleLink ? stale : null,
    make("label", { for: "token", text: "Token" }),
    input,
    make(
      "p",
      { class: "quiet", id: "token-hint" },
      make("code", { text: PRINTS_LINK }),
      " prints a link that signs in. Tokens are in ",
      make("code", { text: "RUN/http/operate.token" }),
      " and ",
      make("code", { text: "read.token" }),
      ", unless the run file names others (tokens in [http]).",
    ),
    fault,
    button,
  );
  return { element: form, title: "Sign in", close: () => {} };
}
