/** The page: who is signed in, and which view the address names. */

import * as api from "./live/api.js";
import { make } from "./parts/elements.js";
import { fail } from "./parts/messages.js";
import { startTheme, themeMenu } from "./parts/theme.js";
import { runView } from "./views/run.js";
import { runsView } from "./views/runs.js";
import { signInView } from "./views/sign_in.js";

/** @typedef {import("./shapes.js").Session} Session */

/**
 * A part of the page that can be shown, and that ends what it started when it is left.
 *
 * @typedef {object} View
 * @property {HTMLElement} element
 * @property {string} title
 * @property {() => void} close
 * @property {((rest: string[]) => boolean) | undefined} [move] another part of the same view
 */

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const top = /** @type {HTMLElement} */ (document.getElementById("top"));

/** @type {Session | null} */
let session = null;
/** @type {View | null} */
let view = null;
let at = "";
/** A link led here that was used already, or is too old. */
let staleLink = false;

/** Takes the token out of the address, so that it is neither seen nor kept in the history. */
function tokenOfAddress() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token !== null) history.replaceState(null, "", location.pathname);
  return token;
}

/** @returns {string[]} */
function parts() {
  return location.hash
    .replace(/^#\/?/, "")
    .split("/")
    .filter((part) => part)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
}

/** @param {View} next @param {boolean} [focus] */
function show(next, focus = true) {
  view?.close();
  view = next;
  main.replaceChildren(next.element);
  settle(focus);
}

/** @param {boolean} focus */
function settle(focus) {
  document.title = view?.title ? `${view.title} · Tessera` : "Tessera";
  if (!focus) return;
  window.scrollTo(0, 0);
  const heading = main.querySelector("h1");
  if (!heading) return;
  heading.tabIndex = -1;
  heading.focus({ preventScroll: true });
}

/** @param {boolean} [focus] */
function route(focus = true) {
  if (!session) {
    at = "";
    return show(signInView(enter, staleLink), false);
  }
  const [kind = "", task = "", ...rest] = parts();
  if (kind === "run" && task) {
    if (at === task && view?.move?.(rest)) return settle(focus);
    at = task;
    return show(runView({ task, rest, canSteer: session.role === "operate" }), focus);
  }
  at = "";
  show(runsView(), focus);
}

/** @param {string} token */
async function enter(token) {
  session = await api.signIn(token);
  staleLink = false;
  drawTop();
  route();
}

/** Signs in by a link; who is signed in already stays so if the link is stale. @param {string} token */
async function follow(token) {
  try {
    session = await api.signIn(token);
  } catch (error) {
    if (!(error instanceof api.Refused) || ![401, 429].includes(error.status)) throw error;
    session = await api.session();
    staleLink = !session;
  }
}

async function leave() {
  try {
    await api.signOut();
  } catch (error) {
    return fail(error);
  }
  signedOut();
}

function signedOut() {
  if (!session) return;
  session = null;
  staleLink = false;
  drawTop();
  route();
}

/** @param {Session} session */
const holder = ({ name, role }) => (role === "operate" ? name : `${name} (may look, not steer)`);

function drawTop() {
  top.replaceChildren(
    make(
      "a",
      { class: "brand", href: "#/" },
      make("img", { src: "/page/icon.svg", alt: "", width: "22", height: "22" }),
      "Tessera",
    ),
    make(
      "div",
      { class: "top-right" },
      session ? make("span", { class: "quiet role", text: holder(session) }) : "",
      themeMenu(),
      session ? make("button", { type: "button", text: "Sign out", click: leave }) : "",
    ),
  );
}

async function start() {
  startTheme();
  api.whenSignedOut(signedOut);
  document.getElementById("skip")?.addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  window.addEventListener("hashchange", () => {
    const token = tokenOfAddress();
    if (token === null) route();
    else
      follow(token)
        .catch(fail)
        .finally(() => {
          drawTop();
          route();
        });
  });
  const token = tokenOfAddress();
  try {
    if (token === null) session = await api.session();
    else await follow(token);
  } catch (error) {
    fail(error);
  }
  drawTop();
  route(false);
}

start();
