/** Elements and their text. Text is always text here: nothing in this page parses HTML. */

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Makes an element.
 *
 * `class` and `text` are what they say, functions are listeners (`click`, `input`, …), `true` is an
 * attribute without a value, `null` and `false` are left out, and all else is an attribute.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} [properties]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") {
      element.addEventListener(name, /** @type {EventListener} */ (value));
    } else if (name === "class") element.className = String(value);
    else if (name === "text") element.textContent = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/**
 * @param {Element} element
 * @param {Child[]} children
 */
export function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/**
 * Gives an element a text, if it has another: an unchanged text costs no layout and is not spoken.
 *
 * @param {Node} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @type {WeakMap<Element, string>} */
const drawn = new WeakMap();

/**
 * Fills an element anew, if what it shows has changed; so nothing that has the focus is replaced
 * for nothing.
 *
 * @param {Element} element
 * @param {unknown} shown all that the children depend on
 * @param {() => Child[]} children
 */
export function fill(element, shown, children) {
  const key = JSON.stringify(shown);
  if (drawn.get(element) === key) return;
  drawn.set(element, key);
  element.replaceChildren();
  append(element, children());
}

/**
 * A text for those who listen, not for those who look.
 *
 * @param {string} text
 */
export const onlyRead = (text) => make("span", { class: "only-read", text });
