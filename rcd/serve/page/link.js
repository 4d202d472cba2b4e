// The page's address holds what is seen: models, prompt, settings, seed, step. Never the API key.

export function write({ prompt, canvas, columns, settings, answer, step }) {
  const parts = new URLSearchParams({ prompt });
  columns.forEach(({ model, carry }, i) => {
    const side = "ab"[i];
    parts.set(side, model);
    if (carry !== undefined) parts.set(`${side}.carry`, carry ? "on" : "off");
  });
  for (const [name, value] of Object.entries(settings)) if (value !== undefined) parts.set(name, value);
  if (canvas) parts.set("canvas", canvas);
  if (answer) parts.set("answer", answer);
  if (step) parts.set("step", step);
  return `#${parts}`;
}

export function read(fragment, names) {
  const parts = new URLSearchParams(fragment.replace(/^#/, ""));
  if (!parts.has("prompt")) return null;
  const settings = {};
  for (const name of names) {
    const value = parts.get(name);
    if (value !== null && value.trim() !== "" && Number.isFinite(Number(value))) settings[name] = Number(value);
  }
  const columns = ["a", "b"].map((side) => {
    const carry = parts.get(`${side}.carry`);
    return { model: parts.get(side), carry: carry === null ? undefined : carry === "on" };
  });
  const step = Number.parseInt(parts.get("step"), 10);
  return { prompt: parts.get("prompt"), canvas: parts.get("canvas"), columns, settings, answer: parts.get("answer"), step: step > 0 ? step : null };
}
