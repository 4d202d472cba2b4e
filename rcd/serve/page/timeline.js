// One timeline for both columns: a lane each shows how many tokens every step committed, a slider moves through the steps.
import { byId, make } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 20;

export class Timeline {
  constructor({ onstep, recordings }) {
    this.recordings = recordings; // () => [{recording, kind, live}]
    this.onstep = onstep;
    this.step = 0;
    this.playing = false;
    this.timer = null;
    this.scrub = byId("scrub");
    this.lanes = byId("lanes");
    this.speed = byId("speed");
    this.scrub.addEventListener("input", () => this.go(this.scrub.valueAsNumber));
    byId("play").addEventListener("click", () => this.toggle());
    byId("back").addEventListener("click", () => this.go(this.step - 1));
    byId("on").addEventListener("click", () => this.go(this.step + 1));
    this.speed.addEventListener("change", () => this.playing && this.tick());
    document.addEventListener("keydown", (event) => this.key(event));
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.speed.value = "0";
  }

  get most() {
    return Math.max(0, ...this.recordings().map(({ recording }) => recording.steps));
  }

  get live() {
    return this.recordings().some(({ live }) => live);
  }

  key(event) {
    if (byId("dock").hidden || event.altKey || event.ctrlKey || event.metaKey || byId("drawer").open) return;
    if (event.target.closest?.("textarea, select, input:not([type=range]), button, [role=button]")) return;
    const acts = { " ": () => this.toggle(), ArrowLeft: () => this.go(this.step - 1), ArrowRight: () => this.go(this.step + 1) };
    acts.Home = () => this.go(0);
    acts.End = () => this.go(this.most);
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // A new run: from the start, as its steps come.
  begin() {
    this.step = 0;
    this.play();
  }

  play() {
    this.playing = true;
    this.tick();
    this.show();
  }

  pause() {
    this.playing = false;
    clearTimeout(this.timer);
    this.show();
  }

  toggle() {
    if (this.playing) return this.pause();
    if (this.step >= this.most && !this.live) this.step = 0;
    this.play();
  }

  go(step) {
    this.playing = false;
    clearTimeout(this.timer);
    this.step = Math.max(0, Math.min(this.most, step));
    this.show();
  }

  tick() {
    clearTimeout(this.timer);
    const pace = Number(this.speed.value);
    this.timer = setTimeout(() => this.advance(pace), pace || 16);
  }

  advance(pace) {
    const most = this.most;
    if (!this.playing) return;
    if (this.step < most) {
      this.step = pace === 0 && this.live ? most : this.step + 1;
      this.show();
    } else if (!this.live) {
      return this.pause();
    }
    this.tick();
  }

  // Draws what there is; called when a step comes, too.
  show() {
    const most = this.most;
    this.scrub.max = String(Math.max(1, most));
    this.scrub.value = String(this.step);
    this.scrub.disabled = most === 0;
    const told = `Step ${this.step} of ${most}${this.live ? " so far" : ""}`;
    byId("where").textContent = told; // no live region: playback would be told step by step
    this.scrub.setAttribute("aria-valuetext", told);
    byId("play").ariaLabel = this.playing ? "Pause" : "Play";
    byId("play").classList.toggle("on", this.playing);
    byId("back").disabled = this.step <= 0;
    byId("on").disabled = this.step >= most;
    this.drawLanes(Math.max(1, most));
    this.onstep(this.step);
  }

  drawLanes(most) {
    const runs = this.recordings();
    const tallest = Math.max(1, ...runs.flatMap(({ recording }) => recording.frames.map((frame) => frame.added)));
    while (this.lanes.children.length < runs.length) this.lanes.append(lane());
    runs.forEach(({ recording, kind }, i) => {
      const box = this.lanes.children[i];
      box.dataset.kind = kind;
      const bars = recording.frames.filter((frame) => frame.step > 0).map((frame) => bar(frame, most, tallest));
      const path = box.querySelector("path");
      if (path.getAttribute("d") !== bars.join("")) path.setAttribute("d", bars.join(""));
      box.querySelector(".end").hidden = !recording.done;
      box.querySelector(".end").style.left = `${(recording.steps / most) * 100}%`;
    });
    this.lanes.style.setProperty("--at", `${(this.step / most) * 100}%`);
  }
}

function lane() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 1000 ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.append(document.createElementNS(SVG, "path"));
  return make("div", { className: "lane" }, svg, make("span", { className: "end", hidden: true }));
}

// A bar at its step, as high as the square root of how many tokens were committed.
function bar(frame, most, tallest) {
  const width = Math.min(12, (1000 / most) * 0.7);
  const height = Math.max(frame.added ? 4 : 1.5, Math.sqrt(frame.added / tallest) * HEIGHT);
  const left = (frame.step / most) * 1000 - width / 2;
  return `M${left.toFixed(2)} ${HEIGHT}h${width.toFixed(2)}v${(-height).toFixed(2)}h${(-width).toFixed(2)}z`;
}
