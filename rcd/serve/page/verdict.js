// Whether an answer is right, by the rules of the package's own graders.
import { conflicts, read } from "./sudoku.js";

function number(text) {
  const found = /^\s*([+-]?\d{1,40})\s*\.?\s*$/.exec(text);
  return found ? found[1].replace(/^\+/, "").replace(/^(-?)0+(?=\d)/, "$1") : null;
}

// true, false, or null where nothing is known
export function judge(text, { answer, puzzle }) {
  if (puzzle) {
    const cells = read(text);
    return cells !== null && conflicts(cells, puzzle).size === 0;
  }
  if (!answer) return null;
  const gold = number(answer);
  if (gold === null) return text.trim() === answer.trim();
  return text.includes("Answer:") && number(text.slice(text.lastIndexOf("Answer:") + 7)) === gold;
}
