// Keeps the end of the conversation in view while it grows, unless the reader has scrolled up.

const AT_END = 4; // pixels: zoomed pages do not scroll to the last pixel

export class Scroller {
  #element;
  #latest;
  #following = true;
  #top = 0;

  /** `latest` is the button that leads back to the end. */
  constructor(element, content, latest) {
    this.#element = element;
    this.#latest = latest;
    element.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    latest.addEventListener("click", () => this.toEnd());
    const observer = new ResizeObserver(() => this.follow());
    observer.observe(element);
    observer.observe(content);
  }

  /** Scrolls to the end if the reader was there. */
  follow() {
    if (this.#following) {
      this.#element.scrollTop = this.#element.scrollHeight;
      this.#top = this.#element.scrollTop;
    }
    this.#show();
  }

  toEnd() {
    this.#following = true;
    this.follow();
  }

  // Only the reader scrolls up. The reader or the page scrolls to the end; growing content only moves it away.
  #onScroll() {
    const { scrollTop } = this.#element;
    if (this.#atEnd) this.#following = true;
    else if (scrollTop < this.#top - 1) this.#following = false;
    this.#top = scrollTop;
    this.#show();
  }

  get #atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#element;
    return scrollHeight - scrollTop - clientHeight < AT_END;
  }

  #show() {
    this.#element.classList.toggle("following", this.#following);
    this.#latest.hidden = this.#following || this.#atEnd;
  }
}
