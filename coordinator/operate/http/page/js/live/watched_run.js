/** One run as the page knows it: asked once, then kept up to date by the coordinator's events. */

import { eventsOf, ofRun, read, Refused } from "./api.js";

/** @typedef {import("../shapes.js").Status} Status */
/** @typedef {import("../shapes.js").DeviceRow} DeviceRow */
/** @typedef {import("../shapes.js").RoundRow} RoundRow */
/** @typedef {"connecting" | "live" | "lost"} Connection */
/** @typedef {{name: "status" | "devices" | "rounds", data: any}} Delta */

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 15000;

export class WatchedRun {
  /** @type {Status | null} */
  status = null;
  /** @type {Map<string, DeviceRow>} */
  devices = new Map();
  /** @type {RoundRow[]} rounds and events, oldest first */
  rounds = [];
  /** @type {Connection} */
  connection = "connecting";
  /** Unix seconds of the newest news */
  heard = 0;

  /** @type {Set<() => void>} */
  #listeners = new Set();
  /** @type {EventSource | null} */
  #source = null;
  /** @type {Delta[] | null} what arrives while everything is asked anew */
  #held = null;
  #retry = 0;
  #wait_ms = FIRST_WAIT_MS;
  /** Differs from the coordinator's clock by so much, in seconds. */
  #ahead_s = 0;

  /** @param {string} task */
  constructor(task) {
    this.task = task;
  }

  /** The coordinator's clock. */
  get now() {
    return Date.now() / 1000 - this.#ahead_s;
  }

  /** @param {() => void} listener @returns {() => void} ends it */
  listen(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  open() {
    this.close();
    const source = new EventSource(eventsOf(this.task));
    this.#source = source;
    source.addEventListener("open", () => this.#askAll());
    source.addEventListener("error", () => this.#lost(source));
    for (const name of /** @type {const} */ (["status", "devices", "rounds"])) {
      source.addEventListener(name, (event) => this.#hear(name, JSON.parse(event.data)));
    }
  }

  close() {
    window.clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  /** Asks for the status now, after something was done. */
  async refresh() {
    this.#hear("status", await read(ofRun(this.task)));
  }

  /** After a break nothing is taken for granted: the coordinator may be another process by now. */
  async #askAll() {
    /** @type {Delta[]} */
    const held = [];
    this.#held = held;
    try {
      const [status, devices, rounds] = await Promise.all([
        read(ofRun(this.task)),
        read(ofRun(this.task, "devices")),
        read(ofRun(this.task, "rounds")),
      ]);
      if (this.#held !== held) return;
      this.#held = null;
      this.devices.clear();
      this.rounds = [];
      this.#take("status", status);
      this.#take("devices", devices);
      this.#take("rounds", rounds);
      for (const { name, data } of held) this.#take(name, data);
      this.#wait_ms = FIRST_WAIT_MS;
      this.#becomes("live");
    } catch (error) {
      if (this.#held === held) this.#held = null;
      if (error instanceof Refused && error.status === 401) return this.close();
      this.#again();
    }
  }

  /** @param {EventSource} source */
  #lost(source) {
    if (source !== this.#source) return;
    // It tries again by itself, unless it was answered with an error.
    if (source.readyState === EventSource.CLOSED) this.#again();
    else this.#becomes("lost");
  }

  #again() {
    this.#source?.close();
    this.#becomes("lost");
    window.clearTimeout(this.#retry);
    this.#retry = window.setTimeout(() => this.open(), this.#wait_ms);
    this.#wait_ms = Math.min(2 * this.#wait_ms, LONGEST_WAIT_MS);
  }

  /** @param {Delta["name"]} name @param {any} data */
  #hear(name, data) {
    if (this.#held) this.#held.push({ name, data });
    else {
      this.#take(name, data);
      this.#changed();
    }
  }

  /** @param {Delta["name"]} name @param {any} data */
  #take(name, data) {
    this.heard = Date.now() / 1000;
    if (name === "status") this.#takeStatus(data);
    else if (name === "devices") this.#takeDevices(data);
    else this.#takeRounds(data);
  }

  /** @param {Status} status */
  #takeStatus(status) {
    if (this.status && this.connection === "live" && status.sequence < this.status.sequence) return;
    this.status = status;
    this.#ahead_s = this.heard - status.time;
  }

  /** @param {DeviceRow[]} rows */
  #takeDevices(rows) {
    for (const row of rows) {
      const old = this.devices.get(row.device);
      if (!old || old.sequence <= row.sequence) this.devices.set(row.device, row);
    }
  }

  /** @param {RoundRow[]} rows */
  #takeRounds(rows) {
    const keyOf = (/** @type {RoundRow} */ row) => `${row.round} ${row.event ?? ""} ${row.time ?? ""}`;
    const there = new Set(this.rounds.slice(-200).map(keyOf));
    const added = rows.filter((row) => !there.has(keyOf(row)));
    if (added.length) this.rounds = [...this.rounds, ...added];
  }

  /** @param {Connection} connection */
  #becomes(connection) {
    this.connection = connection;
    this.#changed();
  }

  #changed() {
    for (const listener of [...this.#listeners]) listener();
  }
}
