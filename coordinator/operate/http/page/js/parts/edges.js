/** Edges behind which there is more: what scrolls to the side shows that it does. */

/** Pixels that are no edge: sizes are rounded. */
const LITTLE = 2;

/**
 * Gives an element the classes `more-left` and `more-right` while there is more in a direction.
 *
 * @param {HTMLElement} scroller
 * @param {HTMLElement} [marked] the element that gets the classes
 */
export function markEdges(scroller, marked = scroller) {
  const mark = () => {
    const { scrollLeft, scrollWidth, clientWidth } = scroller;
    marked.classList.toggle("more-left", scrollLeft > LITTLE);
    marked.classList.toggle("more-right", scrollWidth - clientWidth - scrollLeft > LITTLE);
  };
  scroller.addEventListener("scroll", mark, { passive: true });
  const observer = new ResizeObserver(mark);
  observer.observe(scroller);
  for (const each of scroller.children) observer.observe(each);
}
