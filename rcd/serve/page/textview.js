// The canvas as running text: committed tokens as they read, masked places as chips with their best guess.
import { make, percent, visible } from "./dom.js";
import { uncertainty } from "./recording.js";

const MOST_BLANKS = 64; // places that no step has reached yet, drawn as dots

export class TextView {
  constructor(root) {
    this.root = root;
    this.places = []; // {space, chip} by position
    this.cells = [];
    this.plain = make("span", { className: "plain", hidden: true });
    root.append(this.plain);
    root.addEventListener("keydown", (event) => this.move(event));
  }

  draw(recording, frame, { ended = false } = {}) {
    this.plain.hidden = true;
    this.cells = frame?.cells ?? [];
    const open = ended ? 0 : Math.max(0, Math.min(recording.length - this.cells.length, MOST_BLANKS - this.cells.length));
    const shown = this.cells.length + open;
    while (this.places.length < shown) this.places.push(this.append(this.places.length));
    const firstEnd = this.cells.findIndex((cell) => cell.state === "end");
    this.places.forEach((place, i) => {
      const cell = this.cells[i];
      const hide = i >= shown || (cell?.state === "end" && (i !== firstEnd || ended));
      place.chip.hidden = hide;
      if (hide) this.hide(place);
      else if (cell && !untold(cell)) this.fill(place, cell, i, recording.strongest, ended);
      else this.blank(place);
    });
    if (ended) this.check(recording.text);
    this.keepOneTabStop();
  }

  // The answer itself is what counts: where the last draft differs (a stop string cut it), the answer is shown plainly.
  check(text) {
    const seen = this.places.map(({ space, chip }) => (chip.hidden ? "" : space.data + chip.textContent)).join("");
    if (seen.trim() === text.trim()) return;
    for (const place of this.places) this.hide(place);
    this.plain.textContent = text;
    this.plain.hidden = false;
  }

  append(position) {
    const place = { space: document.createTextNode(""), chip: make("span", { tabIndex: -1, data: { place: position } }) };
    place.chip.setAttribute("role", "button");
    this.root.append(place.space, place.chip);
    return place;
  }

  hide(place) {
    place.space.data = "";
    place.chip.hidden = true;
    place.cell = null;
  }

  fill(place, cell, i, strongest, ended) {
    if (place.cell === cell && place.strongest === strongest && place.ended === ended) return; // frames share cells
    Object.assign(place, { cell, strongest, ended });
    const lead = visible(cell.text) === "∎" ? "" : /^\s*/.exec(cell.text)[0];
    const masked = cell.state === "masked";
    place.space.data = i > 0 && lead.length < cell.text.length ? lead : "";
    const word = lead.length < cell.text.length ? cell.text.slice(lead.length) : cell.text;
    const odd = masked && (word.trim() === "" || visible(word) === "∎");
    const text = cell.state === "end" ? "∎" : odd ? visible(word) : word;
    if (place.chip.textContent !== text) place.chip.textContent = text;
    const names = ["tok", cell.state];
    if (cell.new && !ended) names.push("new"); // a finished text is plain
    if (cell.revised) names.push("revised");
    if (masked && cell.alpha != null) names.push("carried");
    place.chip.className = names.join(" ");
    if (masked) {
      place.chip.style.setProperty("--unsure", uncertainty(cell).toFixed(3));
      place.chip.style.setProperty("--alpha", strongest > 0 ? ((cell.alpha ?? 0) / strongest).toFixed(3) : "0");
    }
    place.chip.ariaLabel = describe(cell, i);
  }

  blank(place) {
    place.cell = null;
    place.space.data = " ";
    if (place.chip.textContent) place.chip.textContent = "";
    place.chip.className = "tok blank";
    place.chip.ariaLabel = "masked, not looked at yet";
  }

  // One stop for Tab, arrows inside.
  keepOneTabStop() {
    const current = this.places.find(({ chip }) => chip.tabIndex === 0 && !chip.hidden);
    if (current) return;
    for (const { chip } of this.places) chip.tabIndex = -1;
    const first = this.places.find(({ chip }) => !chip.hidden);
    if (first) first.chip.tabIndex = 0;
  }

  move(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const chips = this.places.map(({ chip }) => chip).filter((chip) => !chip.hidden);
    const at = chips.indexOf(document.activeElement);
    if (!by || at < 0) return;
    event.preventDefault();
    event.stopPropagation();
    const next = chips[Math.max(0, Math.min(chips.length - 1, at + by))];
    chips[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  cellOf(element) {
    return this.cells[Number(element.dataset.place)] ?? null;
  }
}

// A place that no step has looked at, between those that a canvas gives.
const untold = (cell) => cell.state === "masked" && cell.text === "" && cell.confidence == null;

export function describe(cell, i) {
  const text = visible(cell.text) === "∎" ? "end" : cell.text.trim() || "blank";
  if (cell.state === "end") return `place ${i + 1}: end of the text`;
  if (cell.state === "given") return `place ${i + 1}: ${text}, given`;
  if (cell.state === "committed") return `place ${i + 1}: ${text}${cell.new ? ", new" : ""}`;
  return `place ${i + 1}, masked, best guess ${text}${cell.confidence == null ? "" : `, ${percent(cell.confidence)}`}`;
}
