/** Requests to the coordinator. */

const ROOT = "/api/v1";

/** The coordinator's "no", in its own words. */
export class Refused extends Error {
  /** @param {string} words @param {number} status 0: no answer at all */
  constructor(words, status) {
    super(words);
    this.status = status;
  }
}

/** @type {() => void} */
let onSignedOut = () => {};

/** @param {() => void} listener called when a request finds that nobody is signed in any more */
export function whenSignedOut(listener) {
  onSignedOut = listener;
}

/**
 * @param {"GET" | "POST" | "DELETE"} method
 * @param {string} path below the API's root
 * @param {unknown} [body]
 * @returns {Promise<any>}
 */
async function ask(method, path, body) {
  /** @type {Record<string, string>} */
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(ROOT + path, {
      method,
      headers,
      body: body === undefined ? null : JSON.stringify(body),
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch {
    throw new Refused("The coordinator does not answer.", 0);
  }
  const text = await response.text();
  const answer = parsed(text);
  if (response.ok) return answer;
  if (response.status === 401 && path !== "/session") onSignedOut();
  const words = typeof answer?.error === "string" ? answer.error : "";
  throw new Refused(words || `The coordinator answered ${response.status}.`, response.status);
}

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** @param {string} path @returns {Promise<any>} */
export const read = (path) => ask("GET", path);

/** @param {string} path @param {unknown} body @returns {Promise<any>} */
export const send = (path, body) => ask("POST", path, body);

/** @param {string} task @param {string} [rest] */
export const ofRun = (task, rest = "") => `/runs/${encodeURIComponent(task)}${rest && `/${rest}`}`;

/** @param {string} task @param {string} device @param {string} [rest] */
export const ofDevice = (task, device, rest = "") =>
  ofRun(task, `devices/${encodeURIComponent(device)}${rest && `/${rest}`}`);

/** @param {string} task */
export const eventsOf = (task) => `${ROOT}${ofRun(task, "events")}`;

/** @typedef {import("../shapes.js").Session} Session */

/** Set while somebody is signed in, so that nobody else's page asks who it is. */
const SIGNED_IN = "tessera-signed-in";

/** @param {boolean} signedIn */
function remember(signedIn) {
  try {
    if (signedIn) localStorage.setItem(SIGNED_IN, "yes");
    else localStorage.removeItem(SIGNED_IN);
  } catch {
    // Storage is switched off: a new page asks for the token again.
  }
}

function remembered() {
  try {
    return localStorage.getItem(SIGNED_IN) !== null;
  } catch {
    return false;
  }
}

/** @returns {Promise<Session | null>} who is signed in; null: nobody */
export async function session() {
  if (!remembered()) return null;
  try {
    return await ask("GET", "/session");
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 401) throw error;
    remember(false);
    return null;
  }
}

/** @param {string} token @returns {Promise<Session>} */
export async function signIn(token) {
  const found = await ask("POST", "/session", { token });
  remember(true);
  return found;
}

export async function signOut() {
  await ask("DELETE", "/session");
  remember(false);
}
