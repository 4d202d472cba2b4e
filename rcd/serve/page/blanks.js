// The second field: an answer some of whose tokens are given, and blanks where tokens are wanted.
import { byId, tell } from "./dom.js";

export class Blanks {
  constructor(onrun) {
    byId("canvas").addEventListener("input", () => this.complain(null));
    byId("canvas").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      onrun();
    });
    byId("fill-in").addEventListener("click", () => {
      this.open(byId("blanks").hidden);
      if (!byId("blanks").hidden) byId("canvas").focus();
    });
  }

  // What is given; nothing while the field is closed.
  get text() {
    return byId("blanks").hidden || !byId("canvas").value.trim() ? undefined : byId("canvas").value;
  }

  set(text) {
    byId("canvas").value = text ?? "";
    this.open(Boolean(text));
  }

  open(open) {
    byId("blanks").hidden = !open;
    byId("fill-in").setAttribute("aria-expanded", String(open));
    this.complain(null);
  }

  complain(message) {
    tell(byId("canvas-error"), message);
  }
}
