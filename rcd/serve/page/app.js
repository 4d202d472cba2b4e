// The page: a prompt, two columns, one timeline.
import { Refused, example, models } from "./api.js";
import { Blanks } from "./blanks.js";
import { Column } from "./column.js";
import { byId, make, put, tell } from "./dom.js";
import { thumbnail } from "./gridview.js";
import * as link from "./link.js";
import { Peek } from "./peek.js";
import { defaults, pairs } from "./pairs.js";
import { NAMES, Settings } from "./settings.js";
import { puzzleIn } from "./sudoku.js";
import { Timeline } from "./timeline.js";

const TASKS = { words: "Word problem", sudoku: "Sudoku" };
const MOST_SEED = 1_000_000;
const AGAIN = 1000; // milliseconds until a server that is loading is asked again
const anySeed = () => Math.floor(Math.random() * MOST_SEED);

class App {
  constructor() {
    this.cards = [];
    this.pairs = new Map(); // task -> the two models that an example is shown with
    this.answer = null; // of the prompt as it was taken from an example
    this.jump = null; // the step that a link wants shown
    this.ran = null; // what is shown: {prompt, settings, answer, columns}
    this.drawing = false;
    this.settings = new Settings();
    this.blanks = new Blanks(() => this.runTyped());
    const peek = (this.peek = new Peek());
    const make = (name) => new Column({ name, peek, onchange: () => this.changed(), onretry: (column) => this.retry(column) });
    this.columns = [make("Left"), make("Right")];
    byId("columns").append(...this.columns.map((column) => column.root));
    this.timeline = new Timeline({
      onstep: (step) => this.show(step),
      recordings: () => this.columns.map(({ recording, kind, live }) => ({ recording, kind, live })),
    });
    this.listen();
  }

  listen() {
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.runTyped();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.runTyped();
    });
    prompt.addEventListener("input", () => {
      this.answer = null;
      tell(byId("prompt-error"), null);
      this.fit();
    });
    byId("stop").addEventListener("click", () => this.columns.forEach((column) => column.stop()));
    byId("copy-link").addEventListener("click", () => this.copyLink());
    byId("notice-retry").addEventListener("click", () => this.start());
    window.addEventListener("hashchange", () => this.follow());
    window.addEventListener("resize", () => this.fit());
  }

  // --- the beginning

  async start() {
    byId("notice").hidden = true;
    put(byId("base"), new URL("v1", document.baseURI).href);
    try {
      this.cards = await models(this.settings.key);
    } catch (error) {
      return this.notice(error);
    }
    if (this.cards === null) return this.wait();
    document.body.dataset.state = "ready";
    for (const column of this.columns) column.offer(this.cards);
    this.pairs = pairs(this.cards);
    this.pick(...defaults(this.cards));
    this.offerExamples();
    byId("scope").hidden = !this.cards.every((card) => card.rcd?.task);
    if (!this.follow()) byId("prompt").focus({ preventScroll: true });
  }

  // The models are being loaded.
  wait() {
    this.cards = [];
    tell(byId("notice-text"), "The server is loading its models.");
    byId("notice").hidden = false;
    document.body.dataset.state = "loading";
    setTimeout(() => this.start(), AGAIN);
  }

  notice(error) {
    document.body.dataset.state = "down";
    if (error instanceof Refused && error.status === 401) this.settings.askForKey(error.message);
    tell(byId("notice-text"), error.message);
    byId("notice").hidden = false;
  }

  pick(left, right) {
    this.columns[0].choose(left.model, left.carry);
    this.columns[1].choose(right.model, right.carry);
  }

  offerExamples() {
    const buttons = [...this.pairs.keys()].map((task) => {
      const button = make("button", { type: "button", className: "chip", textContent: TASKS[task] ?? task ?? "Problem" });
      button.addEventListener("click", () => this.takeNew(task));
      return button;
    });
    byId("examples").replaceChildren(...(buttons.length ? [make("span", { className: "hint", textContent: "New example:" })] : []), ...buttons);
    for (const task of this.pairs.keys()) this.offerCard(task);
  }

  // A problem to begin with, on the first screen.
  async offerCard(task) {
    const card = make("button", { type: "button", className: "card" });
    byId("cards").append(card);
    try {
      const drawn = await this.draw(task);
      const puzzle = puzzleIn(drawn.prompt);
      const told = puzzle ? "Fill in the empty cells: 1 to 6 in each row, column and box." : drawn.prompt;
      const words = make("span", { className: "card-text", textContent: told });
      const title = make("b", { textContent: TASKS[drawn.task] ?? "Problem" });
      const go = make("span", { className: "card-go", textContent: "Watch it" });
      card.append(...(puzzle ? [thumbnail(puzzle)] : []), make("span", { className: "card-words" }, title, words, go));
      card.addEventListener("click", () => this.take(task, drawn));
      byId("cards").hidden = document.body.dataset.state !== "ready";
    } catch {
      card.remove(); // the buttons below the prompt say what is wrong when they are pressed
    }
  }

  draw(task) {
    return example(this.pairs.get(task)[1].model, anySeed(), this.settings.key);
  }

  async takeNew(task) {
    if (this.drawing) return;
    this.drawing = true;
    try {
      this.take(task, await this.draw(task));
    } catch (error) {
      tell(byId("prompt-error"), error.message);
    } finally {
      this.drawing = false;
    }
  }

  take(task, { prompt, answer }) {
    const here = this.columns.every(({ card }) => (card?.rcd?.task ?? null) === task);
    if (!here) this.pick(...this.pairs.get(task));
    byId("prompt").value = prompt;
    this.blanks.set(null);
    this.answer = answer ?? null;
    this.run();
  }

  // --- running

  asked() {
    const prompt = byId("prompt").value;
    const settings = this.settings.values;
    if (settings.temperature > 0) settings.seed ??= anySeed(); // both columns draw by it, and the link keeps it
    return { prompt, canvas: this.blanks.text, settings, answer: this.answer, puzzle: puzzleIn(prompt), key: this.settings.key };
  }

  // Whether the words before the first blank are the prompt, which a chat has to have.
  get alone() {
    return Boolean(this.blanks.text) && this.columns.every(({ card }) => !card?.rcd?.chat);
  }

  // What was typed goes to models that know its kind: those of sudokus know nothing else, and others know no sudokus.
  runTyped() {
    const kind = puzzleIn(byId("prompt").value) ? "sudoku" : "words";
    const other = kind === "sudoku" ? "words" : "sudoku";
    const lost = this.columns.every(({ card }) => card?.rcd?.task === other);
    if (lost && this.pairs?.has(kind) && byId("prompt").value.trim()) this.pick(...this.pairs.get(kind));
    return this.run();
  }

  async run() {
    tell(byId("prompt-error"), null);
    if (!byId("prompt").value.trim() && !this.alone) {
      tell(byId("prompt-error"), "Type a problem first, or take an example.");
      return byId("prompt").focus();
    }
    if (!this.cards.length) return;
    const asked = this.asked();
    document.body.dataset.state = "run";
    for (const id of ["hero", "cards"]) byId(id).hidden = true;
    for (const id of ["legend", "dock"]) byId(id).hidden = false;
    byId("legend-given").hidden = !asked.canvas;
    this.fit();
    this.say(`Running ${this.columns.map(({ card }) => card.id).join(" and ")}.`);
    this.ran = { ...asked, columns: this.columns.map(({ card, carry }) => ({ model: card.id, carry })) };
    const runs = this.columns.map((column) => this.watched(column, asked));
    this.keepAddress();
    this.timeline.begin();
    await this.finish(runs);
  }

  // A run whose error is shown as soon as it comes.
  async watched(column, asked) {
    const error = await column.run(asked);
    if (error !== null && !this.beside(error)) column.complain();
  }

  async retry(column) {
    this.say(`Running ${column.card.id} again.`);
    const again = this.watched(column, { ...column.asked, key: this.settings.key });
    this.timeline.begin();
    await this.finish([again]);
  }

  async finish(runs) {
    await Promise.all(runs);
    if (this.columns.some(({ live }) => live)) return;
    this.timeline.show();
    if (this.jump !== null) this.timeline.go(this.jump);
    this.jump = null;
    this.say(this.columns.filter(({ state }) => state !== "idle").map(({ summary }) => summary).join(" "));
  }

  // An error that names a field of the page is shown there.
  beside(error) {
    if (error.status === 401) this.settings.askForKey(error.message);
    else if (/^(prompt|messages)\b/.test(error.param ?? "")) tell(byId("prompt-error"), error.message);
    else if (error.param === "rcd.canvas") this.blanks.complain(error.message);
    else return this.settings.refuse(error.param, error.message);
    return true;
  }

  changed() {
    if (!this.timeline) return; // the columns are being made
    const live = this.columns.some((column) => column.live);
    byId("stop").hidden = !live;
    byId("run").hidden = live;
    this.settings.suggest(this.columns.map(({ card }) => card));
    this.timeline.show();
  }

  show(step) {
    for (const column of this.columns) column.show(step);
    this.peek.renew();
  }

  say(text) {
    byId("live").textContent = text;
  }

  fit() {
    const prompt = byId("prompt");
    prompt.style.height = "auto";
    const { lineHeight, paddingTop } = getComputedStyle(prompt); // whole lines, so that none is cut in half
    const most = (document.body.dataset.state === "run" ? 3 : 8) * parseFloat(lineHeight) + parseFloat(paddingTop);
    prompt.style.height = `${Math.min(prompt.scrollHeight + 2, most)}px`;
  }

  // --- the address

  get address() {
    const step = this.timeline.playing || this.timeline.step >= this.timeline.most ? null : this.timeline.step;
    const { prompt, canvas, columns, settings, answer } = this.ran;
    return link.write({ prompt, canvas, columns, settings, answer, step });
  }

  keepAddress() {
    if (this.ran) history.replaceState(null, "", this.address);
  }

  async copyLink() {
    this.keepAddress();
    const button = byId("copy-link");
    try {
      await navigator.clipboard.writeText(location.href);
      put(button, "Link copied");
      this.say("The link is copied.");
    } catch {
      put(button, "See the address bar");
      this.say("The link stands in the address bar.");
    }
    button.addEventListener("blur", () => put(button, "Copy link"), { once: true });
  }

  // Does what the address says; whether it says anything.
  follow() {
    const seen = link.read(location.hash, NAMES);
    if (!seen || !this.cards.length) return false;
    const own = defaults(this.cards);
    this.pick(...seen.columns.map((column, i) => (this.cards.some(({ id }) => id === column.model) ? column : own[i])));
    this.settings.set(seen.settings);
    byId("prompt").value = seen.prompt;
    this.blanks.set(seen.canvas);
    this.answer = seen.answer;
    this.jump = seen.step;
    this.run();
    return true;
  }
}

new App().start();
