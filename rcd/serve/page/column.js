// One column: a model, its run and what is shown of it at a step.
import { answer, CutOff } from "./api.js";
import { byId, counted, make, put, tell } from "./dom.js";
import { GridView } from "./gridview.js";
import { Recording, tokensIn } from "./recording.js";
import { TextView } from "./textview.js";
import { judge } from "./verdict.js";

const MOTTOS = {
  seqd: "throws away what it does not commit",
  rcd: "carries forward what it does not commit",
};
const ENDS = { eos: "the model ended its text", stop: "a stop string ended it", length: "the length was reached" };

export class Column {
  constructor({ name, peek, onchange, onretry }) {
    this.root = byId("column").content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.root.querySelector(selector);
    Object.assign(this, { name, onchange, recording: new Recording(), state: "idle", step: 0, asked: null, abort: null });
    this.cards = [];
    this.asText = false;
    this.textView = new TextView(this.find(".text"));
    this.gridView = new GridView(this.find(".grid"));
    for (const view of [this.textView, this.gridView]) peek.watch(view.root ?? view.table, (element) => view.cellOf(element));
    this.root.setAttribute("aria-label", name);
    this.find(".text").ariaLabel = `${name}: tokens`;
    this.find(".grid").ariaLabel = `${name}: grid`;
    this.find(".model").addEventListener("change", () => {
      this.clear();
      this.choose(this.find(".model").value);
    });
    this.find(".carry").addEventListener("change", () => {
      this.clear();
      this.dress();
    });
    this.find(".trouble button").addEventListener("click", () => onretry(this));
    this.find(".as-text").addEventListener("click", () => this.toggleText());
    this.find(".copy").addEventListener("click", () => this.copy());
  }

  // --- which model

  offer(cards) {
    this.cards = cards;
    this.find(".model").replaceChildren(...cards.map((card) => make("option", { value: card.id, textContent: card.id })));
  }

  get card() {
    return this.cards.find((card) => card.id === this.find(".model").value) ?? null;
  }

  get carries() {
    return this.card?.rcd?.carry !== undefined && this.card.rcd.carry !== "none";
  }

  // What is sent: nothing where the switch stands as the model was trained.
  get carry() {
    const on = this.find(".carry").checked;
    return on === this.carries ? undefined : on;
  }

  choose(model, carry = undefined) {
    if (this.cards.some((card) => card.id === model)) this.find(".model").value = model;
    this.find(".carry").checked = this.carries && (carry ?? true);
    this.find(".switch").hidden = !this.carries; // there is nothing to switch
    this.dress();
  }

  dress() {
    const on = this.find(".carry").checked;
    this.kind = on ? "rcd" : "seqd";
    this.root.dataset.kind = this.kind;
    const other = on && this.carries && this.card.rcd.carry !== "residual";
    put(this.find(".badge"), other ? this.card.rcd.carry : on ? "RCD" : "SeqD");
    put(this.find(".motto"), MOTTOS[this.kind]);
    if (this.state === "idle") put(this.find(".idle"), this.card ? `${this.card.id} waits for Run.` : "");
    this.onchange(this);
  }

  // --- a run

  get live() {
    return this.state === "waiting" || this.state === "running";
  }

  enter(state) {
    this.state = state;
    this.root.dataset.state = state;
    this.root.ariaBusy = String(this.live);
    this.onchange(this);
  }

  stop() {
    this.abort?.abort();
  }

  // Another model was chosen: what is shown was not its answer.
  clear() {
    if (this.state === "idle") return;
    this.stop();
    Object.assign(this, { abort: null, asked: null, recording: new Recording() });
    for (const name of [".text", ".grid", ".verdict", ".trouble", ".as-text", ".copy"]) this.find(name).hidden = true;
    for (const name of ["steps", "tokens", "rate", "forwards", "time"]) this.put(name, "–");
    put(this.find(".status"), "");
    this.find(".idle").hidden = false;
    delete this.root.dataset.shown;
    this.enter("idle");
  }

  // Runs to the end, whatever happens, and returns the error that ended it, or null.
  async run(asked) {
    this.stop();
    const abort = new AbortController();
    Object.assign(this, { asked, abort, recording: new Recording() });
    tell(this.find(".trouble p"), null);
    this.find(".trouble").hidden = true;
    const started = performance.now();
    const seconds = () => (performance.now() - started) / 1000;
    this.enter("waiting");
    try {
      for await (const piece of answer({ ...asked, card: this.card, carry: this.carry, carrying: this.kind === "rcd" }, { key: asked.key, signal: abort.signal })) {
        if (this.abort !== abort) return null;
        this.take(piece, seconds());
      }
      this.enter("done");
    } catch (error) {
      if (this.abort !== abort) return null;
      return this.fail(error);
    }
    return null;
  }

  take({ draft, text, done }, seconds) {
    if (draft) this.recording.add(draft, seconds);
    if (text) this.recording.text += text;
    if (done) this.recording.done = done;
    if (this.state === "waiting" && (draft || text)) this.enter("running");
    else this.onchange(this);
  }

  fail(error) {
    if (error.name === "AbortError") {
      this.enter("stopped");
      return null;
    }
    const kept = this.recording.steps ? ` What came until step ${this.recording.steps} is kept.` : "";
    const wait = error.wait ? ` The server asks to wait ${counted(error.wait, "second")}.` : "";
    this.trouble = error.message + wait + kept;
    this.enter(error instanceof CutOff || kept ? "cut" : "refused");
    return error;
  }

  // The error, in the column itself, unless it is shown beside the field that it names.
  complain() {
    put(this.find(".trouble p"), this.trouble);
    this.find(".trouble").hidden = false;
    this.find(".trouble p").hidden = false;
  }

  // --- what is shown

  get puzzle() {
    const task = this.card?.rcd?.task;
    return this.asked?.puzzle && (!task || task === "sudoku") ? this.asked.puzzle : null;
  }

  get ended() {
    return this.state === "done" && this.step >= this.recording.steps;
  }

  show(step) {
    this.step = step;
    if (this.state === "idle") return;
    const { recording, puzzle, ended } = this;
    const frame = recording.at(step);
    const grid = puzzle !== null && !this.asText;
    this.find(".idle").hidden = this.state !== "refused";
    put(this.find(".idle"), "Nothing came.");
    this.find(".grid").hidden = !grid;
    this.find(".text").hidden = grid;
    if (grid) this.gridView.draw(recording, frame, { puzzle, ended });
    else this.textView.draw(recording, frame, { ended });
    this.root.dataset.shown = ended ? "end" : "step";
    this.root.dataset.step = String(frame?.step ?? 0);
    this.count(frame, ended);
    this.tellStatus(frame, ended);
    this.find(".as-text").hidden = puzzle === null;
    this.find(".copy").hidden = !recording.text;
  }

  count(frame, ended) {
    const { done, text } = this.recording;
    const last = ended && done ? done : null;
    const steps = last?.denoising_steps ?? frame?.step ?? 0;
    const tokens = last?.tokens ?? (frame ? tokensIn(frame.cells) : 0);
    const rate = last?.tokens_per_step ?? (steps ? tokens / steps : null);
    const time = last?.seconds ?? frame?.seconds;
    this.put("steps", steps || !text ? String(steps) : "–");
    this.put("tokens", String(tokens));
    this.put("rate", rate === null ? "–" : rate.toFixed(2));
    this.put("forwards", last ? String(last.forwards) : "–");
    this.put("time", time === undefined ? "–" : time < 10 ? `${time.toFixed(2)} s` : `${time.toFixed(1)} s`);
  }

  put(name, text) {
    put(this.find(`[data-count=${name}]`), text);
  }

  tellStatus(frame, ended) {
    const { recording, state } = this;
    const said = {
      waiting: recording.frames.length ? "Reading the prompt" : "Waiting for a place",
      running: "Denoising",
      done: ended ? `Done: ${ENDS[recording.done?.stop_reason] ?? "the answer is complete"}.` : `Step ${frame?.step ?? 0} of ${recording.steps}`,
      stopped: "Stopped. What came is kept.",
      cut: `Cut off at step ${recording.steps}.`,
      refused: "Not run.",
    };
    put(this.find(".status"), said[state] ?? "");
    const right = ended ? this.right : null;
    this.find(".verdict").hidden = right === null;
    this.find(".verdict").dataset.right = String(right);
    put(this.find(".verdict"), right === null ? "" : right ? "✓ right" : "✗ wrong");
  }

  get right() {
    return this.state === "done" ? judge(this.recording.text, { answer: this.asked.answer, puzzle: this.puzzle }) : null;
  }

  toggleText() {
    this.asText = !this.asText;
    this.find(".as-text").ariaPressed = String(this.asText);
    this.show(this.step);
  }

  async copy() {
    const button = this.find(".copy");
    try {
      await navigator.clipboard.writeText(this.recording.text);
      put(button, "Copied");
    } catch {
      put(button, "Not allowed here");
    }
    button.addEventListener("blur", () => put(button, "Copy text"), { once: true });
  }

  // One sentence for the live region.
  get summary() {
    const { done, steps } = this.recording;
    if (this.state !== "done") return `${this.name}: ${this.find(".status").textContent}`;
    const verdict = { true: ", right", false: ", wrong", null: "" }[this.right];
    return `${this.name}: ${counted(done?.denoising_steps ?? steps, "step")}${verdict}. ${this.recording.text}`;
  }
}
