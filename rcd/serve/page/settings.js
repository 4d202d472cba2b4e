// The drawer: what both columns are asked with. Empty fields are the model's own; the key stays in this tab.
import { byId, make, tell } from "./dom.js";

// Bounds are the server's to check; these only help to type.
const FIELDS = [
  { name: "threshold", label: "Threshold", step: "0.01", min: "0", max: "1", help: "A step commits what is surer than this." },
  { name: "temperature", label: "Temperature", step: "0.1", min: "0", help: "0 takes the best; above, tokens are drawn." },
  { name: "seed", label: "Seed", step: "1", min: "0", help: "What tokens are drawn by; left empty, another one every time.", own: "any" },
  { name: "max_tokens", label: "Most new tokens", step: "1", min: "1", help: "How long an answer may be." },
  { name: "t_res", label: "Residual temperature (t_res)", step: "0.05", min: "0", help: "Below 1 sharpens what is carried." },
  { name: "alpha_scale", label: "Alpha scale", step: "0.1", min: "0", help: "Multiplies how much is carried; 0 is SeqD.", own: "1" },
];
export const NAMES = FIELDS.map((field) => field.name);
const KEY = "rcd-api-key";

export class Settings {
  constructor() {
    this.drawer = byId("drawer");
    this.inputs = new Map(FIELDS.map((field) => [field.name, build(field)]));
    const key = byId("key");
    key.value = kept();
    key.addEventListener("change", () => keep(key.value.trim()));
    key.addEventListener("input", () => tell(byId("key-error"), null));
    byId("open-settings").addEventListener("click", () => this.open());
    byId("fields").addEventListener("input", (event) => {
      this.complain(event.target.name, null);
      this.changed();
    });
    byId("reset").addEventListener("click", () => this.set({}));
    this.drawer.addEventListener("click", (event) => event.target === this.drawer && this.drawer.close());
  }

  get key() {
    return byId("key").value.trim();
  }

  get values() {
    return Object.fromEntries([...this.inputs].map(([name, input]) => [name, input.value === "" ? undefined : input.valueAsNumber]));
  }

  set(values) {
    for (const [name, input] of this.inputs) {
      input.value = values[name] === undefined ? "" : String(values[name]);
      this.complain(name, null);
    }
    this.changed();
  }

  changed() {
    const count = Object.values(this.values).filter((value) => value !== undefined).length;
    byId("changed").hidden = count === 0;
    byId("changed").textContent = String(count);
    byId("changed").ariaLabel = `${count} changed`;
  }

  // What the models do by themselves, as placeholders.
  suggest(cards) {
    for (const [name, input] of this.inputs) {
      if (FIELDS.find((field) => field.name === name).own) continue;
      const own = cards.map((card) => (name === "max_tokens" ? card?.rcd?.max_new_tokens : card?.rcd?.defaults?.[name]));
      const known = [...new Set(own.filter((value) => value !== undefined && value !== null))];
      input.placeholder = known.length ? known.join(" | ") : "the model's own";
    }
  }

  open(name = null) {
    if (!this.drawer.open) this.drawer.showModal();
    (name === "key" ? byId("key") : this.inputs.get(name))?.focus();
  }

  complain(name, message) {
    const input = this.inputs.get(name);
    if (!input) return;
    tell(byId(`${input.id}-error`), message);
    if (message) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }

  // An error that names a field is shown beside it; says whether there is such a field.
  refuse(param, message) {
    const name = (param ?? "").replace(/^rcd\./, "").replace("residual_scale", "alpha_scale").replace("max_completion_tokens", "max_tokens");
    if (!this.inputs.has(name)) return false;
    this.open(name);
    this.complain(name, message);
    return true;
  }

  askForKey(message) {
    this.open("key");
    tell(byId("key-error"), message);
  }
}

function build({ name, label, help, own = "", ...numbers }) {
  const id = `set-${name}`;
  const input = make("input", { id, name, type: "number", inputMode: "decimal", placeholder: own, ...numbers });
  input.setAttribute("aria-describedby", `${id}-help ${id}-error`);
  const error = make("p", { className: "field-error", id: `${id}-error`, hidden: true });
  error.setAttribute("role", "alert");
  byId("fields").append(
    make("label", { htmlFor: id, textContent: label }),
    input,
    make("p", { className: "hint", id: `${id}-help`, textContent: help }),
    error,
  );
  return input;
}

function kept() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function keep(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage is blocked: the key lasts as long as the page
  }
}
