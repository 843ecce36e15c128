/** Repaints a view when its data changed: at once, but at most once a second. */

const PAUSE_MS = 1000;

export class Painter {
  #paint;
  #last = Number.NEGATIVE_INFINITY;
  #timer = 0;
  #frame = 0;

  /** @param {() => void} paint */
  constructor(paint) {
    this.#paint = paint;
  }

  /** Data changed: paint soon. */
  soon() {
    if (this.#timer || this.#frame) return;
    const wait = Math.max(0, this.#last + PAUSE_MS - performance.now());
    this.#timer = window.setTimeout(() => {
      this.#timer = 0;
      // A page that nobody looks at has no frames, and so paints nothing.
      this.#frame = requestAnimationFrame(() => this.now());
    }, wait);
  }

  /** A person did something: paint now. */
  now() {
    this.stop();
    this.#last = performance.now();
    this.#paint();
  }

  stop() {
    window.clearTimeout(this.#timer);
    cancelAnimationFrame(this.#frame);
    this.#timer = 0;
    this.#frame = 0;
  }
}
