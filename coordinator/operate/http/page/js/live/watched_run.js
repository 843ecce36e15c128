/**
 * One run as the page knows it, kept up to date by the coordinator's events.
 *
 * A connection begins with everything and goes on with changes, so after a break nothing is taken
 * for granted: the coordinator may be another process by now. A page that nobody looks at lets go of
 * its connection after a while; browsers have few for each address.
 */

import { eventsOf, ofRun, Refused, read } from "./api.js";

/** @typedef {import("../shapes.js").Status} Status */
/** @typedef {import("../shapes.js").DeviceRow} DeviceRow */
/** @typedef {import("../shapes.js").RoundRow} RoundRow */
/** @typedef {"connecting" | "live" | "lost" | "unknown"} Connection */

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 15000;
const UNSEEN_MS = 60000;

export class WatchedRun {
  /** @type {Status | null} */
  status = null;
  /** @type {Map<string, DeviceRow>} */
  devices = new Map();
  /** @type {RoundRow[]} rounds and events, oldest first */
  rounds = [];
  /** @type {Connection} `unknown`: the coordinator has no such run */
  connection = "connecting";
  /** Unix seconds of the newest news, by this machine's clock */
  heard = 0;

  /** @type {() => void} */
  #changed;
  /** @type {EventSource | null} */
  #source = null;
  /** @type {Set<string>} kinds of events of which this connection has told everything */
  #whole = new Set();
  #retry = 0;
  #unseen = 0;
  #wait_ms = FIRST_WAIT_MS;
  /** The coordinator's clock is behind by so many seconds. */
  #behind_s = 0;

  /** @param {string} task @param {() => void} changed called after every change */
  constructor(task, changed) {
    this.task = task;
    this.#changed = changed;
  }

  /** The coordinator's clock, in Unix seconds. */
  get now() {
    return Date.now() / 1000 - this.#behind_s;
  }

  open() {
    document.addEventListener("visibilitychange", this.#look);
    this.#connect();
  }

  close() {
    document.removeEventListener("visibilitychange", this.#look);
    window.clearTimeout(this.#unseen);
    this.#disconnect();
  }

  /** Asks for the status now, after something was done. */
  async refresh() {
    this.#takeStatus(await read(ofRun(this.task)));
    this.#changed();
  }

  #connect() {
    this.#disconnect();
    this.#whole.clear();
    const source = new EventSource(eventsOf(this.task));
    this.#source = source;
    source.addEventListener("error", () => {
      if (source === this.#source) this.#lost();
    });
    const on = (/** @type {string} */ name, /** @type {(data: any) => void} */ take) =>
      source.addEventListener(name, (event) => {
        take(JSON.parse(event.data));
        this.#changed();
      });
    on("status", (data) => this.#takeStatus(data));
    on("devices", (data) => this.#takeDevices(data));
    on("rounds", (data) => this.#takeRounds(data));
  }

  #disconnect() {
    window.clearTimeout(this.#retry);
    this.#source?.close();
    this.#source = null;
  }

  #lost() {
    this.#disconnect();
    this.connection = "lost";
    this.#retry = window.setTimeout(() => this.#again(), this.#wait_ms);
    this.#wait_ms = Math.min(2 * this.#wait_ms, LONGEST_WAIT_MS);
    this.#changed();
  }

  /** An event stream does not say why it was refused; an ordinary request does. */
  async #again() {
    try {
      await read(ofRun(this.task));
      this.#connect();
    } catch (error) {
      const status = error instanceof Refused ? error.status : 0;
      if (status === 401) return;
      this.#lost();
      if (status === 404) this.connection = "unknown";
    }
  }

  #look = () => {
    window.clearTimeout(this.#unseen);
    if (document.hidden) this.#unseen = window.setTimeout(() => this.#disconnect(), UNSEEN_MS);
    else if (!this.#source) this.#connect();
  };

  /** @param {Status} status */
  #takeStatus(status) {
    const first = !this.#whole.has("status");
    if (!first && this.status && status.sequence < this.status.sequence) return;
    this.#whole.add("status");
    this.status = status;
    this.heard = Date.now() / 1000;
    this.#behind_s = this.heard - status.time;
    this.connection = "live";
    this.#wait_ms = FIRST_WAIT_MS;
    if (status.devices.known === 0) this.devices.clear();
    else if (!first && this.devices.size > status.devices.known) this.#askDevices();
  }

  /** @param {DeviceRow[]} rows */
  #takeDevices(rows) {
    if (!this.#whole.has("devices")) this.devices.clear();
    this.#whole.add("devices");
    for (const row of rows) {
      const old = this.devices.get(row.device);
      if (!old || old.sequence <= row.sequence) this.devices.set(row.device, row);
    }
  }

  /** @param {RoundRow[]} rows */
  #takeRounds(rows) {
    const whole = this.#whole.has("rounds");
    this.#whole.add("rounds");
    if (!whole) this.rounds = rows;
    // An event can undo rounds, which changes alone would not tell.
    else if (rows.some((row) => row.event)) this.#askRounds();
    else {
      const last = this.rounds.at(-1)?.round ?? 0;
      this.rounds = [...this.rounds, ...rows.filter((row) => row.round > last)];
    }
  }

  /** A device was forgotten, which changes alone do not tell. */
  async #askDevices() {
    try {
      const rows = await read(ofRun(this.task, "devices"));
      this.#whole.delete("devices");
      this.#takeDevices(rows);
      this.#changed();
    } catch {
      // The connection's own error is the one that is shown.
    }
  }

  async #askRounds() {
    try {
      this.rounds = await read(ofRun(this.task, "rounds"));
      this.#changed();
    } catch {
      // As above.
    }
  }
}
