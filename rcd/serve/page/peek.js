// The alternatives of a place: shown while it is pointed at or has the focus, and kept by a tap.
import { byId, make, percent, visible } from "./dom.js";
import { uncertainty } from "./recording.js";

const GAP = 8;
const LEAST = 0.001; // alternatives below are not worth a line

export class Peek {
  constructor() {
    this.box = byId("peek");
    this.anchor = null;
    this.pinned = false;
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
    document.addEventListener("pointerdown", (event) => {
      if (!this.anchor?.contains(event.target)) this.hide();
    });
    window.addEventListener("scroll", () => this.hide(), { passive: true, capture: true });
    window.addEventListener("resize", () => this.hide());
  }

  // `find` gives the cell of an element of the container, as it is at the moment.
  watch(container, find) {
    const over = (event) => {
      const place = event.target.closest?.("[data-place]");
      if (place && (event.type !== "pointerover" || (event.pointerType === "mouse" && !this.pinned))) this.show(place, find);
    };
    container.addEventListener("pointerover", over);
    container.addEventListener("focusin", over);
    container.addEventListener("click", (event) => {
      over(event);
      this.pinned = this.anchor !== null;
    });
    container.addEventListener("pointerleave", () => !this.pinned && this.hide());
    container.addEventListener("focusout", () => this.hide());
  }

  show(anchor, find) {
    const cell = find(anchor);
    if (!cell) return this.hide();
    if (this.anchor !== anchor) this.hide();
    Object.assign(this, { anchor, find });
    anchor.setAttribute("aria-describedby", "peek");
    this.box.replaceChildren(...contents(cell, Number(anchor.dataset.place)));
    this.box.hidden = false;
    this.place();
  }

  // The step changed under it.
  renew() {
    if (!this.anchor) return;
    if (this.anchor.isConnected && !this.anchor.hidden) this.show(this.anchor, this.find);
    else this.hide();
  }

  place() {
    const at = this.anchor.getBoundingClientRect();
    const own = this.box.getBoundingClientRect();
    const left = Math.max(GAP, Math.min(at.left + at.width / 2 - own.width / 2, document.documentElement.clientWidth - own.width - GAP));
    const above = at.top - own.height - GAP;
    this.box.style.left = `${left}px`;
    this.box.style.top = `${above >= GAP ? above : Math.min(at.bottom + GAP, Math.max(GAP, window.innerHeight - own.height - GAP))}px`;
  }

  hide() {
    this.anchor?.removeAttribute("aria-describedby");
    this.anchor = null;
    this.pinned = false;
    this.box.hidden = true;
  }
}

const STATES = { committed: "committed", masked: "masked: best guess", end: "end of the text" };

function contents(cell, place) {
  const head = make("p", { className: "peek-head" }, make("b", { textContent: `Place ${place + 1}` }), ` ${STATES[cell.state]}`);
  const best = (cell.best ?? []).filter(([, share], i) => i === 0 || share >= LEAST);
  const list = make("ol", { className: "peek-list" }, ...best.map(([text, share]) => row(text, share, text === cell.text)));
  const figures = [];
  if (best.length) figures.push(`unsure ${percent(uncertainty(cell))}`);
  else if (cell.confidence != null) figures.push(`sure ${percent(cell.confidence)}`);
  if (cell.alpha != null && cell.state === "masked") figures.push(`alpha ${cell.alpha.toFixed(2)}`);
  if (cell.revised) figures.push("replaces another token");
  if (!best.length && !figures.length) figures.push("Committed in an earlier step.");
  return [head, ...(best.length ? [list] : []), make("p", { className: "peek-foot", textContent: figures.join(" · ") })];
}

function row(text, share, chosen) {
  const bar = make("span", { className: "peek-bar", ariaHidden: "true" });
  bar.style.width = `${Math.max(1, share * 100)}%`;
  return make(
    "li",
    { className: chosen ? "chosen" : "" },
    make("span", { className: "peek-token", textContent: visible(text) }),
    make("span", { className: "peek-room" }, bar),
    make("span", { className: "peek-share", textContent: percent(share) }),
  );
}
