// A sudoku's answer as its grid: clues, committed digits, and pencil marks where the model is not sure yet.
import { make } from "./dom.js";
import { uncertainty } from "./recording.js";
import { SIDE, conflicts, placeOf } from "./sudoku.js";
import { describe } from "./textview.js";

const LEAST_MARK = 0.04;

export class GridView {
  constructor(table) {
    this.table = table;
    this.cells = [];
    this.boxes = [];
    table.addEventListener("keydown", (event) => this.move(event));
  }

  build() {
    const body = make("tbody");
    for (let r = 0; r < SIDE; r++) {
      const row = make("tr");
      for (let c = 0; c < SIDE; c++) {
        const inner = make("span", { className: "cell", tabIndex: this.boxes.length ? -1 : 0, data: { place: placeOf(r * SIDE + c) } });
        inner.setAttribute("role", "button");
        this.boxes.push(inner);
        row.append(make("td", {}, inner));
      }
      body.append(row);
    }
    this.table.replaceChildren(body);
  }

  draw(recording, frame, { puzzle, ended = false }) {
    if (!this.boxes.length) this.build();
    this.cells = frame?.cells ?? [];
    const found = puzzle.map((_, i) => this.cells[placeOf(i)]);
    const digits = found.map((cell) => (cell && cell.state !== "masked" ? cell.text.trim() || "∎" : ""));
    const wrong = ended ? conflicts(digits, puzzle) : new Set();
    this.boxes.forEach((box, i) => this.fill(box, found[i], puzzle[i], { wrong: wrong.has(i), ended, i, strongest: recording.strongest }));
  }

  fill(box, cell, clue, { wrong, ended, i, strongest }) {
    const committed = cell && cell.state !== "masked";
    const digit = committed ? cell.text.trim() || "∎" : clue;
    const names = ["cell"];
    if (clue) names.push("clue");
    if (committed) names.push(cell.state === "given" ? "given" : "committed");
    if (cell?.new && !ended) names.push("new");
    if (wrong) names.push("wrong");
    if (!committed && !clue) names.push(cell ? "masked" : "blank");
    if (cell && !committed && !clue && cell.alpha != null) names.push("carried");
    box.className = names.join(" ");
    if (digit || !cell) box.replaceChildren(digit || "");
    else box.replaceChildren(marks(cell));
    if (cell && !committed) {
      box.style.setProperty("--unsure", clue ? "0" : uncertainty(cell).toFixed(3));
      box.style.setProperty("--alpha", strongest > 0 ? ((cell.alpha ?? 0) / strongest).toFixed(3) : "0");
    }
    const where = `row ${Math.floor(i / SIDE) + 1}, column ${(i % SIDE) + 1}`;
    const state = clue && !committed ? `clue ${clue}` : cell ? describe(cell, placeOf(i)).replace(/^place \d+[:,] /, "") : "empty";
    box.ariaLabel = `${where}: ${state}${wrong ? ", wrong" : ""}`;
  }

  move(event) {
    const by = { ArrowRight: 1, ArrowDown: SIDE, ArrowLeft: -1, ArrowUp: -SIDE }[event.key];
    const at = this.boxes.indexOf(document.activeElement);
    if (!by || at < 0) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.boxes[at + by];
    if (!next) return;
    this.boxes[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  cellOf(element) {
    return this.cells[Number(element.dataset.place)] ?? null;
  }
}

// The likely digits, each at its own corner and the larger the likelier.
function marks(cell) {
  const shares = new Map((cell.best ?? []).map(([text, share]) => [text.trim(), share]));
  const box = make("span", { className: "marks", ariaHidden: "true" });
  for (let digit = 1; digit <= SIDE; digit++) {
    const share = shares.get(String(digit)) ?? 0;
    const mark = make("span", { className: "mark-digit", textContent: share >= LEAST_MARK ? String(digit) : "" });
    mark.style.setProperty("--share", Math.sqrt(share).toFixed(3));
    box.append(mark);
  }
  return box;
}

// A small picture of a puzzle, for the examples.
export function thumbnail(puzzle) {
  const box = make("span", { className: "thumb", ariaHidden: "true" });
  box.append(...puzzle.map((digit) => make("span", { textContent: digit })));
  return box;
}
