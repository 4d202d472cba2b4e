// Sudokus of 6 x 6 cells in boxes of two rows and three columns, as the task writes them: rows parted by "/" or lines.
export const SIDE = 6;
const ROW = "[1-6_](?:[ \\t]+[1-6_]){5}";
const GRID = new RegExp(`${ROW}(?:\\s*[/\\n]\\s*${ROW}){5}\\s*$`);
const DIGITS = new Set("123456");

const cellsOf = (text) => text.trim().split(/[/\n]/).map((row) => row.trim().split(/\s+/));

// The clues of a prompt that ends in a puzzle (36 of "1" to "6" or ""), or null.
export function puzzleIn(prompt) {
  const found = GRID.exec(prompt);
  return found ? cellsOf(found[0]).flat().map((cell) => (cell === "_" ? "" : cell)) : null;
}

// The 36 digits of an answer, or null where it is anything else.
export function read(text) {
  const rows = cellsOf(text);
  const whole = rows.length === SIDE && rows.every((row) => row.length === SIDE && row.every((cell) => DIGITS.has(cell)));
  return whole ? rows.flat() : null;
}

// A row is six cells and a "/": where in the answer a cell stands.
export const placeOf = (cell) => Math.floor(cell / SIDE) * (SIDE + 1) + (cell % SIDE);

function units() {
  const all = Array.from({ length: SIDE * SIDE }, (_, cell) => cell);
  const by = (key) => Object.values(Object.groupBy(all, key));
  return [...by((c) => Math.floor(c / 6)), ...by((c) => c % 6), ...by((c) => Math.floor(c / 12) * 2 + Math.floor((c % 6) / 3))];
}
const UNITS = units();

// The cells that break a rule: not a digit, another than the clue, or twice in a row, column or box.
export function conflicts(cells, clues) {
  const wrong = new Set();
  cells.forEach((digit, i) => {
    if (digit !== "" && (!DIGITS.has(digit) || (clues[i] && clues[i] !== digit))) wrong.add(i);
  });
  for (const unit of UNITS) {
    for (const i of unit) {
      if (cells[i] !== "" && unit.some((j) => j !== i && cells[j] === cells[i])) wrong.add(i);
    }
  }
  return wrong;
}
