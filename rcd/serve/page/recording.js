// What one column saw: a frame a step, kept so that it can be looked at again.
export const MOST_CELLS = 150_000;
const SHARED = 0.05; // what a cell costs that is another frame's too

// How unsure a prediction is, 0 to 1: the entropy of its best alternatives, everything else counted as one more.
export function uncertainty(cell) {
  const best = cell.best ?? [];
  if (!best.length) return cell.confidence == null ? 1 : Math.min(1, 1 - cell.confidence);
  const shares = best.map(([, share]) => share);
  shares.push(Math.max(0, 1 - shares.reduce((sum, share) => sum + share, 0)));
  const bits = shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log(share) : sum), 0);
  return Math.max(0, Math.min(1, bits / Math.log(shares.length)));
}

export class Recording {
  constructor(most = MOST_CELLS) {
    this.most = most;
    this.frames = [];
    this.length = 0;
    this.text = "";
    this.done = null;
    this.strongest = 0; // the largest alpha so far
    this.stride = 1; // every so many steps one is kept
    this.kept = 0; // cells that are kept; those of the frame before count little
  }

  get last() {
    return this.frames.at(-1) ?? null;
  }

  get steps() {
    return this.last?.step ?? 0;
  }

  // A draft's canvas starts at its offset; what stands before it has not changed.
  add(draft, seconds) {
    const before = this.last?.cells ?? [];
    const cells = before.slice(0, draft.offset);
    const fresh = draft.canvas.map((cell, j) => settled(cell, before[draft.offset + j]));
    cells.push(...fresh);
    for (const cell of fresh) this.strongest = Math.max(this.strongest, cell.alpha ?? 0);
    if (draft.step !== this.steps) for (let i = 0; i < draft.offset; i++) if (cells[i]?.new) cells[i] = { ...cells[i], new: false };
    const own = cells.reduce((sum, cell, i) => sum + (cell === before[i] ? SHARED : 1), 0);
    const frame = { step: draft.step, cells, seconds, own, added: newIn(cells) };
    if (this.frames.length && this.last.step === draft.step) this.kept -= this.frames.pop().own;
    this.thinLast();
    this.frames.push(frame);
    this.length = draft.length;
    this.kept += own;
    while (this.kept > this.most && this.frames.length > 3) this.thin();
  }

  // The frame before the newest was kept only because it was the newest.
  thinLast() {
    if (this.frames.length > 1 && this.last.step % this.stride !== 0) this.kept -= this.frames.pop().own;
  }

  thin() {
    this.stride *= 2;
    const newest = this.last;
    this.frames = this.frames.filter((frame) => frame === newest || frame.step % this.stride === 0);
    this.kept = this.frames.reduce((sum, frame) => sum + frame.own, 0);
  }

  // The newest frame that is not newer than a step.
  at(step) {
    let low = 0;
    let high = this.frames.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].step <= step) low = middle + 1;
      else high = middle;
    }
    return this.frames[low - 1] ?? null;
  }
}

function newIn(cells) {
  return cells.reduce((sum, cell) => sum + (cell.new && cell.state === "committed" ? 1 : 0), 0);
}

// A committed token keeps the alternatives that it had when it was committed, and shares its cell with the frame before.
function settled(cell, before) {
  if (cell.state === "masked" || cell.new || !before) return cell;
  if (before.state !== cell.state || before.text !== cell.text) return cell;
  return before.new ? { ...before, new: false } : before;
}

// Tokens of an answer so far: what is committed, and one end.
export function tokensIn(cells) {
  const committed = cells.filter((cell) => cell.state === "committed").length;
  return committed + (cells.some((cell) => cell.state === "end") ? 1 : 0);
}
