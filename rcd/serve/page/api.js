// What the page asks of the server. Addresses are relative to the page, so that it works behind a path of a proxy.
import { messages } from "./sse.js";

const ALTERNATIVES = 6;
const at = (path) => new URL(path, document.baseURI);

export class Refused extends Error {
  // The server answered, with an error: status, the field it names, and when to come back.
  constructor(message, { status = 0, param = null, wait = null } = {}) {
    super(message);
    Object.assign(this, { status, param, wait });
  }
}

export class Unreachable extends Error {
  constructor() {
    super("The server cannot be reached. Is rcd serve still running?");
  }
}

export class CutOff extends Error {
  constructor() {
    super("The server went away in the middle of the answer.");
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(at(path), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable();
  }
  if (response.ok) return response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // not our server's words: a proxy's page, say
  }
  throw new Refused(told?.message ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    param: told?.param ?? null,
    wait: Number.parseInt(response.headers.get("Retry-After"), 10) || null,
  });
}

async function get(path, key) {
  const response = await ask(path, { headers: headers(key) });
  try {
    return await response.json();
  } catch {
    throw new Unreachable();
  }
}

// The models, or null while they are still being loaded.
export async function models(key) {
  const { data } = await get("v1/models", key);
  let ready = true;
  try {
    await ask("ready");
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 503) throw error;
    ready = false;
  }
  return ready ? data : null;
}

export function example(model, seed, key) {
  return get(`rcd/examples?${new URLSearchParams({ model, seed })}`, key);
}

// What is set of the residual goes to those that carry one; others would refuse it.
function bodyOf({ card, prompt, canvas, settings, carry, carrying }) {
  const { threshold, t_res, alpha_scale, ...plain } = settings;
  const asked = { prompt: prompt.trim() ? prompt : undefined, messages: [{ role: "user", content: prompt }] };
  delete asked[card.rcd?.chat ? "prompt" : "messages"];
  const rcd = { drafts: true, alternatives: ALTERNATIVES, threshold, carry, canvas, ...(carrying ? { t_res, alpha_scale } : {}) };
  return JSON.stringify({ model: card.id, ...asked, ...plain, stream: true, rcd }); // undefined ones are left out
}

// Yields {draft}, {text} and {done} until the answer is complete; throws Refused, Unreachable, CutOff or an AbortError.
export async function* answer(request, { key, signal }) {
  const response = await ask(request.card.rcd?.chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: bodyOf(request),
    signal,
  });
  try {
    for await (const message of messages(response.body)) {
      if (message === "[DONE]") return;
      yield* pieces(JSON.parse(message));
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Refused) throw error;
    throw new CutOff();
  }
  throw new CutOff();
}

function* pieces(chunk) {
  if (chunk.error) throw new Refused(chunk.error.message, { param: chunk.error.param ?? null });
  for (const choice of chunk.choices ?? []) {
    const text = choice.text ?? choice.delta?.content;
    if (text) yield { text };
  }
  if (chunk.rcd?.type === "draft") yield { draft: chunk.rcd };
  if (chunk.rcd?.type === "done") yield { done: chunk.rcd };
}
