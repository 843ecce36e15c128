/** Asks the coordinator again whenever something changed: one question at a time, some time apart. */

import { Refused, read } from "./api.js";

const APART_MS = 2000;

export class Asker {
  #path;
  #take;
  #refused;
  #wanted = "";
  #asked = "";
  #busy = false;
  #closed = false;
  #timer = 0;
  #last = Number.NEGATIVE_INFINITY;

  /**
   * @param {string} path
   * @param {(answer: any) => void} take
   * @param {(error: unknown) => void} refused not called when the connection is lost, or the
   *   session has ended: the page says that elsewhere
   */
  constructor(path, take, refused) {
    this.#path = path;
    this.#take = take;
    this.#refused = refused;
  }

  /** @param {unknown} moment another one than before: what was answered then is old */
  ask(moment) {
    this.#wanted = String(moment);
    this.#next();
  }

  close() {
    this.#closed = true;
    window.clearTimeout(this.#timer);
  }

  async #next() {
    if (this.#busy || this.#timer || this.#closed || this.#wanted === this.#asked) return;
    const wait = this.#last + APART_MS - performance.now();
    if (wait > 0) {
      this.#timer = window.setTimeout(() => {
        this.#timer = 0;
        this.#next();
      }, wait);
      return;
    }
    this.#busy = true;
    this.#asked = this.#wanted;
    try {
      const answer = await read(this.#path);
      if (!this.#closed) this.#take(answer);
    } catch (error) {
      const known = error instanceof Refused && (error.status === 0 || error.status === 401);
      if (!known && !this.#closed) this.#refused(error);
    }
    this.#busy = false;
    this.#last = performance.now();
    this.#next();
  }
}
