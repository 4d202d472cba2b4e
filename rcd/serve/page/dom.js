// Small helpers. Text goes in through textContent alone: whatever a prompt or a model says, it is text.

export const byId = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  const { data = {}, aria = {}, ...plain } = properties;
  Object.assign(element, plain);
  Object.assign(element.dataset, data);
  for (const [key, value] of Object.entries(aria)) element.setAttribute(`aria-${key}`, value);
  element.append(...children);
  return element;
}

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A message, or nothing: hidden where there is none.
export function tell(element, text) {
  put(element, text ?? "");
  element.hidden = !text;
}

const SIGNS = { "\n": "↵", "\t": "⇥", " ": "␣" };

const END = /^<[|]?(eos|s|end|endoftext|end_of_text|eot|eot_id|im_end)[|]?>$|^<\/s>$/i;

// A token on its own: its blanks made visible, an end token as a sign.
export function visible(text) {
  if (text === "") return "∅";
  if (END.test(text.trim())) return "∎";
  return text.replace(/^\s+|\s+$/g, (blanks) => [...blanks].map((blank) => SIGNS[blank] ?? "␣").join(""));
}

export const percent = (share) => (share >= 0.995 && share < 1 ? ">99%" : share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`);

export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
