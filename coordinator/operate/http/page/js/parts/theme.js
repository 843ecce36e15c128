/** Light or dark: the system's choice, unless a person chose. */

import { make } from "./elements.js";

const KEY = "tessera-theme";
/** @type {Record<string, string>} */
const NAMES = { auto: "As the system", light: "Light", dark: "Dark" };
const CHANGED = "tessera-theme";

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    const value = localStorage.getItem(KEY) ?? "auto";
    return value in NAMES ? value : "auto";
  } catch {
    return "auto"; // storage is switched off
  }
}

/** @param {string} theme */
function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = theme;
  colours.clear();
  window.dispatchEvent(new Event(CHANGED));
}

/** @type {Map<string, string>} */
const colours = new Map();

const probe = make("span", { hidden: true });

/**
 * A colour of the theme for canvases, which understand neither properties nor `light-dark()`.
 *
 * @param {string} name of a custom property
 * @returns {string}
 */
export function colour(name) {
  let value = colours.get(name);
  if (value === undefined) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${name})`;
    value = getComputedStyle(probe).color;
    colours.set(name, value);
  }
  return value;
}

/** @param {() => void} listener @returns {() => void} ends it */
export function whenColoursChange(listener) {
  window.addEventListener(CHANGED, listener);
  return () => window.removeEventListener(CHANGED, listener);
}

export function startTheme() {
  dark.addEventListener("change", () => apply(chosen()));
  apply(chosen());
}

/** A menu to choose from. */
export function themeMenu() {
  const now = chosen();
  return make(
    "label",
    { class: "theme-menu" },
    make("span", { class: "only-read", text: "Colours" }),
    make(
      "select",
      {
        change: (/** @type {Event} */ event) => {
          const value = /** @type {HTMLSelectElement} */ (event.target).value;
          try {
            localStorage.setItem(KEY, value);
          } catch {
            // Storage is switched off: the choice lasts until the page is left.
          }
          apply(value);
        },
      },
      ...Object.entries(NAMES).map(([value, text]) =>
        make("option", { value, text, selected: value === now }),
      ),
    ),
  );
}
