// Which two models are compared: one without residual context, one with.

const carries = (card) => card.rcd?.carry !== undefined && card.rcd.carry !== "none";

// Two models of a kind, without and with; of one model alone, the same twice.
function pairOf(cards) {
  const plain = cards.find((card) => !carries(card));
  const carrying = cards.find(carries) ?? plain;
  return [plain ? { model: plain.id } : { model: carrying.id, carry: false }, { model: carrying.id }];
}

// Task (null: none of ours) -> the two models that its examples are shown with.
export function pairs(cards) {
  const found = new Map();
  for (const task of new Set(cards.map((card) => card.rcd?.task ?? null))) {
    const able = cards.filter((card) => (card.rcd?.task ?? null) === task);
    const whole = able.filter((card) => card.rcd?.window === "bidirectional"); // a whole grid at once is nicest to watch
    found.set(task, pairOf(task === "sudoku" && whole.length ? whole : able));
  }
  return found;
}

// What the page begins with: word problems, or else the first task that there is.
export function defaults(cards) {
  const found = pairs(cards);
  return found.get("words") ?? found.values().next().value;
}
