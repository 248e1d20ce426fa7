// Calls to the server: the token, views as JSON, and one stream of changes for all that the page shows.

const STORED = "areal-token";
let token = takeToken();
let refused = () => {};

// From the fragment of the address that `areal ui` printed, which is cleared. The tab keeps it, so that a reload works.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(STORED, given);
    history.replaceState(history.state, "", location.pathname + location.search);
  }
  return given || sessionStorage.getItem(STORED) || "";
}

// The address of a server that was started again, put in the place of this page's: the browser loads nothing for a fragment.
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) { takeToken(); location.reload(); }
});

export function setToken(given) {
  const text = given.trim();
  token = text.includes("token=") ? new URLSearchParams(text.slice(text.indexOf("token="))).get("token") : text;
  sessionStorage.setItem(STORED, token);
}

export function onRefused(run) { refused = run; }

export const queryText = (query) => new URLSearchParams(
  Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "").sort(),
).toString();

export class Failure extends Error {
  constructor(status, type, message, hint) { super(message); Object.assign(this, { status, type, hint }); }
}

async function ask(view, query, { signal, body }) {
  const text = queryText(query);
  let answer;
  try {
    answer = await fetch(`/api/${view}${text ? "?" + text : ""}`, {
      method: body === undefined ? "GET" : "POST",
      headers: { Authorization: `Bearer ${token}` },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal, cache: "no-store", credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "Unreachable", "the server of this page does not answer", "is `areal ui` still running? its address and token change when it starts again");
  }
  if (!answer.ok) {
    if (answer.status === 401) refused();
    throw failureOf(answer.status, await answer.json());
  }
  return answer;
}

const failureOf = (status, { error: { type, message, hint } }) => new Failure(status, type, message, hint);

// { data, marks } of a view. Throws Failure; status 0: the server does not answer.
export async function call(view, query = {}, { signal, body } = {}) {
  const answer = await ask(view, query, { signal, body });
  return { data: await answer.json(), marks: JSON.parse(answer.headers.get("Areal-Marks") || "{}") };
}

// Calls run(part) for each part of an answer that comes in parts. Throws Failure, also for one that ends early.
export async function callParts(view, body, run, { signal } = {}) {
  const answer = await ask(view, {}, { signal, body });
  let whole = false;
  await pieces(answer, "\n", (line) => {
    const part = JSON.parse(line);
    if (part.error) throw failureOf(500, part);
    whole = "finishReason" in part;
    run(part);
  });
  if (!whole) throw new Failure(0, "Unreachable", "the answer was cut short", "is `areal ui` still running?");
}

async function pieces(answer, separator, run) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const found = (rest + value).split(separator);
    rest = found.pop();
    found.forEach(run);
  }
}

// -- changes

const watches = new Map(); // "view?query" -> Set of callbacks(marks)
let stream = null;
let reopen = null;
let waits = 1000;
const stateListeners = new Set();
export const live = { connected: false, since: 0 };

function setConnected(connected) {
  if (live.connected === connected) return;
  Object.assign(live, { connected, since: Date.now() });
  stateListeners.forEach((run) => run());
}

export function onLive(run) { stateListeners.add(run); return () => stateListeners.delete(run); }

// Calls run({ all, marks }) for the cursors of a view: all of them when the stream opens, then those that differ.
export function watch(view, query, run) {
  const key = `${view}?${queryText(query)}`;
  if (!watches.has(key)) { watches.set(key, new Set()); schedule(50); }
  watches.get(key).add(run);
  return () => {
    watches.get(key)?.delete(run);
    if (watches.get(key)?.size === 0) { watches.delete(key); schedule(50); }
  };
}

function schedule(after) {
  clearTimeout(reopen);
  reopen = setTimeout(open, after);
}

async function open() {
  stream?.abort();
  stream = null;
  if (!watches.size || document.hidden || !token) return; // a hidden page holds no connection: browsers allow six
  const mine = (stream = new AbortController());
  const names = [...watches.keys()].map((key) => "watch=" + encodeURIComponent(key)).join("&");
  try {
    const answer = await fetch(`/api/changes?${names}`, {
      headers: { Authorization: `Bearer ${token}` }, signal: mine.signal, cache: "no-store", credentials: "omit",
    });
    if (!answer.ok) { if (answer.status === 401) refused(); throw new Error(String(answer.status)); }
    setConnected(true);
    waits = 1000;
    await pieces(answer, "\n\n", deliver);
    throw new Error("the stream ended");
  } catch (error) {
    if (mine.signal.aborted) return;
    setConnected(false);
    schedule(waits);
    waits = Math.min(10000, waits * 2);
  }
}

function deliver(text) {
  const kind = /^event: (.*)$/m.exec(text)?.[1];
  const data = /^data: (.*)$/m.exec(text)?.[1];
  if (!data) return;
  const { watch: key, marks } = JSON.parse(data);
  watches.get(key)?.forEach((run) => run({ all: kind === "marks", marks }));
}

document.addEventListener("visibilitychange", () => schedule(document.hidden ? 5000 : 0));
