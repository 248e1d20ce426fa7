// The page that `--html` writes: the episodes of a file or job, in one document without a server. Joined behind tokens.js,
// whose names it uses.
import { COLOURS, histogramOf, legendOf, make, plural, readable, showEpisode, versionsOf } from "./tokens.js";
import { duration, number } from "./numbers.js";

const data = JSON.parse(document.getElementById("data").textContent);
const ROW = 50;
const state = { at: null, colour: "logprob", find: "", sort: "recorded", from: null, to: null };
data.episodes.forEach((episode, index) => Object.assign(episode, { index, tokens: episode.turns.reduce((sum, turn) => sum + (turn.lp?.length ?? 0), 0), found: null }));
const versions = versionsOf(data.episodes);
const rewards = data.episodes.map((each) => each.reward);
const textOf = (episode) => (episode.found ??= [episode.name, ...episode.origin, ...Object.values(episode.example), ...episode.turns.map((turn) => (turn.messages ? turn.messages.map((each) => each[1]).join("\n") : turn.texts.join("")))].join("\n").toLowerCase());
const SORTS = {
  recorded: (a, b) => a.index - b.index,
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.index - b.index,
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || a.index - b.index,
  longest: (a, b) => b.tokens - a.tokens || a.index - b.index,
};

// A list of rows of one height, of which only those on the screen are built. The selected row keeps the focus.
let shown = [];
const rows = make("div", { class: "rows", role: "listbox", "aria-label": "Episodes", tabindex: "0" });
const space = make("div", { role: "presentation" });
rows.append(space);
const built = new Map();
function place() {
  const first = Math.max(0, Math.floor(rows.scrollTop / ROW) - 10), last = Math.min(shown.length, first + Math.ceil((rows.clientHeight || 600) / ROW) + 20);
  for (const [at, node] of built) if (at < first || at >= last) { node.remove(); built.delete(at); }
  for (let at = first; at < last; at += 1) if (!built.has(at)) { const node = rowOf(shown[at], at); built.set(at, node); space.append(node); }
  const selected = shown.findIndex((each) => each.index === state.at);
  for (const [at, node] of built) node.setAttribute("aria-selected", String(at === selected));
  if (selected >= 0) rows.setAttribute("aria-activedescendant", `row-${state.at}`);
  else rows.removeAttribute("aria-activedescendant");
}
function rowOf(episode, at) {
  const node = make("div", { class: "row-of", role: "option", id: `row-${episode.index}`, "aria-setsize": shown.length, "aria-posinset": at + 1, onclick: () => pick(episode.index) },
    make("b", {}, readable(episode.name, 80)), make("span", { class: "num" }, episode.reward === null ? "no reward" : number(episode.reward)), make("span", { class: "hint mono" }, readable((episode.hint || "").replace(/\s+/g, " "), 120)));
  node.style.top = `${at * ROW}px`;
  return node;
}
function list() {
  shown = data.episodes.filter((each) => (!state.find || textOf(each).includes(state.find)) && (state.from === null || (each.reward !== null && each.reward >= state.from - 1e-9 && each.reward <= state.to + 1e-9))).sort(SORTS[state.sort]);
  built.forEach((node) => node.remove());
  built.clear();
  space.style.height = `${shown.length * ROW}px`;
  count.textContent = shown.length === data.episodes.length ? plural(shown.length, "episode") : `${shown.length.toLocaleString("en-US")} of ${plural(data.episodes.length, "episode")}`;
  place();
}
function pick(index) {
  state.at = index;
  history.replaceState(null, "", `#${index}`);
  const at = shown.findIndex((each) => each.index === index);
  if (at * ROW < rows.scrollTop) rows.scrollTop = at * ROW;
  else if ((at + 1) * ROW > rows.scrollTop + rows.clientHeight) rows.scrollTop = (at + 1) * ROW - rows.clientHeight;
  place();
  episode();
}

const host = make("div", {});
const about = make("div", { class: "about" });
const main = make("main", { tabindex: "-1" }, about, host);
function episode() {
  const found = data.episodes[state.at];
  if (!found) { about.replaceChildren(make("p", { class: "empty" }, "no episode")); host.replaceChildren(); return; }
  const facts = [...found.origin, found.reward === null ? "no reward" : `reward ${number(found.reward)}`, plural(found.turns.length, "turn"), plural(found.tokens, "generated token"),
    found.seconds ? duration(found.seconds) : null, found.failures.length ? `failures: ${found.failures.join(", ")}` : null].filter(Boolean);
  const fields = Object.entries(found.example);
  about.replaceChildren(make("div", { class: "head" }, make("h2", {}, readable(found.name, 200)), make("span", { class: "dim" }, facts.join("  ·  "))),
    ...(fields.length ? [make("details", { class: "panel example" }, make("summary", {}, `example (${fields.map((each) => each[0]).join(", ")})`),
      make("dl", { class: "facts" }, fields.map(([name, value]) => [make("dt", {}, name), make("dd", { class: "mono" }, readable(value, 20000))])))] : []),
    legendOf(state.colour, versions));
  showEpisode(host, found, { colour: state.colour, versions });
  main.scrollTop = 0;
}

const colours = COLOURS.map((each) => make("button", { type: "button", "aria-pressed": String(each === state.colour), onclick: () => paint(each) }, each));
function paint(colour) {
  state.colour = colour;
  colours.forEach((each) => each.setAttribute("aria-pressed", String(each.textContent === colour)));
  episode();
}
const spread = make("div", { class: "pad" });
function histogram() {
  const focused = [...spread.querySelectorAll("button")].indexOf(document.activeElement);
  spread.replaceChildren(histogramOf(rewards, { from: state.from, to: state.to, onPick: (from, to) => { Object.assign(state, { from, to: to ?? null }); histogram(); list(); } }));
  if (focused >= 0) spread.querySelectorAll("button")[focused]?.focus();
}
const count = make("span", { class: "dim", role: "status" });
const find = make("input", { type: "search", placeholder: "find  (/)", "aria-label": "Find", oninput: (event) => { state.find = event.target.value.toLowerCase(); list(); } });
const sort = make("select", { "aria-label": "Sort", onchange: (event) => { state.sort = event.target.value; list(); } }, Object.keys(SORTS).map((each) => make("option", {}, each)));
document.title = data.title;
document.getElementById("app").replaceChildren(
  make("header", { class: "top page" }, make("h1", {}, data.title), count, !data.decoded && make("span", { class: "dim" }, "token ids: no tokenizer"),
    make("div", { class: "row tools", role: "group", "aria-label": "Colour of tokens" }, colours)),
  data.leftOut && make("section", { class: "left-out", "aria-label": "what is left out" }, data.leftOut),
  make("div", { class: "split" }, make("aside", {}, make("div", { class: "row pad" }, find, sort), spread, rows), main));
rows.addEventListener("scroll", place, { passive: true });
addEventListener("resize", place);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) { if (event.key === "Escape") rows.focus(); return; }
  if (event.key === "/") { find.focus(); event.preventDefault(); return; }
  if (COLOURS[Number(event.key) - 1]) { paint(COLOURS[Number(event.key) - 1]); return; }
  const at = shown.findIndex((each) => each.index === state.at), page = Math.max(1, Math.floor(rows.clientHeight / ROW) - 1);
  const to = { j: at + 1, ArrowDown: at + 1, k: at - 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1, PageDown: at + page, PageUp: at - page }[event.key];
  if (to === undefined || !shown.length) return;
  event.preventDefault();
  pick(shown[Math.max(0, Math.min(shown.length - 1, to))].index);
});
histogram();
list();
const wanted = Number(location.hash.slice(1));
pick(data.episodes[wanted] ? wanted : 0);
rows.focus({ preventScroll: true });
