// One episode, token by token: its turns, with tokens coloured by log-probability, version, advantage or mask, and a
// tooltip for mouse, keyboard and touch. Plain DOM: `--html` writes this file and numbers.js into a page of its own.
// All text goes in as text nodes; what hides, reverses or rings is spelled.

import { number } from "./numbers.js";

export function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

export const plural = (count, word) => `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;

export const COLOURS = ["logprob", "version", "advantage", "mask"];
const STEPS = [-0.1, -0.36, -0.7, -1.6, -3, -5]; // e^-0.1 = 0.9, e^-5 = 0.007
const SHARES = ["> 90%", "> 70%", "> 50%", "> 20%", "> 5%", "> 0.7%", "less"];
const SPECIAL = /^<[|\uff5c]?[^<>\s]{1,40}[|\uff5c]?>$/u;
const HIDDEN = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb])/u;
const LONGEST = 2000; // characters of one token, or of one message at first
const AT_ONCE = 4000; // tokens that are built at first
const FOLDED = 600; // characters of a prompt that is closed at first

export function readable(text, most = LONGEST) {
  const nodes = [];
  const shown = text.length > most ? text.slice(0, most) : text;
  for (const piece of shown.split(/(\n)/)) {
    if (piece === "\n") { nodes.push(make("span", { class: "nl", "aria-hidden": "true" }, "↵"), "\n"); continue; }
    for (const part of piece.split(HIDDEN)) {
      if (part && HIDDEN.test(part)) nodes.push(make("span", { class: "ctl" }, `\\u${part.codePointAt(0).toString(16).padStart(4, "0")}`));
      else if (part) nodes.push(part);
    }
  }
  if (shown.length < text.length) nodes.push(make("span", { class: "cut" }, `… ${plural(text.length - shown.length, "more character")}`));
  return nodes;
}

// Versions of all its tokens, in order: the colours by version.
export const versionsOf = (episodes) => [...new Set(episodes.flatMap((each) => each.turns.flatMap((turn) => turn.v ?? [])))].sort((a, b) => a - b);

export function legendOf(colour, versions) {
  const item = (name, text) => [make("i", { class: name }), make("span", {}, text)];
  if (colour === "logprob") return make("div", { class: "legend" }, "probability of the sampled token", SHARES.map((share, at) => item(`p${at}`, share)));
  if (colour === "version") return make("div", { class: "legend" }, "version of the weights that sampled it", versions.map((version, at) => item(`v${at % 6}`, `v${version}`)));
  if (colour === "advantage") return make("div", { class: "legend" }, "advantage that it is trained with", item("a-bad", "below 0"), item("a-none", "0, or not trained on"), item("a-good", "above 0"));
  return make("div", { class: "legend" }, "loss mask", item("m1", "generated: trained on"), item("m0", "prompt: not trained on"));
}

// Fills `host` with the turns. `open`: prompts too; null: only short ones. `brief`: the facts of a single turn stand elsewhere.
export function showEpisode(host, episode, { colour = "logprob", versions = versionsOf([episode]), open = null, brief = false } = {}) {
  const tip = tooltipOf(host);
  tip.hide();
  host.classList.add("tokens");
  host.replaceChildren(...episode.turns.map((turn) => turnOf(turn, { colour, versions, open, brief, several: episode.turns.length > 1 })), tip.node);
}

function turnOf(turn, view) {
  const sampled = (turn.lp ?? []).filter((each) => each !== null);
  const mean = sampled.length ? sampled.reduce((sum, each) => sum + each, 0) / sampled.length : null;
  const facts = [
    turn.reward !== null && `reward ${number(turn.reward)}`,
    turn.ret !== null && turn.ret !== (turn.reward ?? 0) && `return ${number(turn.ret)}`,
    turn.advantage !== null && `advantage ${number(turn.advantage)}`,
    turn.lp && plural(turn.lp.length, "token"),
    mean !== null && `mean logprob ${number(mean)}`,
    turn.temperature && `T ${turn.temperature}`,
    turn.finish,
  ].filter(Boolean);
  const box = make("div", { class: turn.depth ? "turn branch" : "turn", role: "group", "aria-label": `turn ${turn.number}` },
    (view.several || turn.truncated || !view.brief) && make("header", {}, view.several && make("b", {}, `turn ${turn.number}`),
      (view.several || !view.brief) && make("span", {}, facts.join("  ·  ")), turn.truncated && make("span", { class: "warn" }, "truncated")));
  if (turn.depth) box.style.marginLeft = `${Math.min(turn.depth, 6) * 20}px`;
  if (turn.messages) {
    turn.messages.forEach(([role, text], at) => box.append(messageOf(role, text, at === turn.messages.length - 1, view)));
    return box;
  }
  if (turn.before) box.append(make("div", { class: "before" }, `${plural(turn.before, "token")} as above`));
  let taken = 0;
  for (const [generated, from, to] of stretches(turn.mask)) {
    box.append(generated ? answerOf(turn, from, to, taken, view) : promptOf(turn, from, to, view));
    if (generated) taken += to - from;
  }
  return box;
}

function* stretches(mask) {
  for (let from = 0, to = 1; from < mask.length; from = to++) {
    while (to < mask.length && mask[to] === mask[from]) to += 1;
    yield [mask[from] === "1", from, to];
  }
}

function fold(title, length, fill, view) {
  const box = make("details", { class: "run prompt" }, make("summary", {}, title));
  let filled = false;
  const look = () => { if (box.open && !filled) { filled = true; fill(box); } };
  box.addEventListener("toggle", look);
  box.open = view.open ?? length <= FOLDED;
  look();
  return box;
}

function promptOf(turn, from, to, view) {
  const length = turn.texts.slice(from, to).reduce((sum, text) => sum + (text ?? "123456 ").length, 0);
  return fold(`${from ? "between answers" : "prompt"}, ${plural(to - from, "token")}`, length, (box) => box.append(tokensOf(turn, from, to, -1, view)), view);
}

function messageOf(role, text, last, view) {
  if (last) return make("div", { class: "run" }, make("span", { class: "role" }, role), ...readable(text, 20 * LONGEST));
  return fold(role, text.length, (box) => box.append(make("div", {}, ...readable(text, 20 * LONGEST))), view);
}

function answerOf(turn, from, to, taken, view) {
  const box = make("div", { class: "run" });
  if (turn.turns) box.append(make("span", { class: "role" }, `turn ${turn.turns[taken] + 1}`));
  box.append(tokensOf(turn, from, to, taken, view));
  return box;
}

// A stretch of tokens: one stop of the tab key, in which arrows move.
function tokensOf(turn, from, to, taken, view) {
  const box = make("div", { class: "stretch", tabindex: "0", role: "group", "aria-label": `${plural(to - from, "token")}, arrows move` });
  box.turn = turn;
  const add = (begin) => {
    const end = Math.min(to, begin + AT_ONCE);
    const nodes = [];
    for (let at = begin; at < end; at += 1) nodes.push(tokenOf(turn, at, taken < 0 ? -1 : taken + at - from, view));
    box.append(...nodes);
    if (end < to) {
      const more = make("button", { type: "button", onclick: () => { more.remove(); add(end); } }, `${plural(to - end, "more token")}`);
      box.append(more);
    }
  };
  add(from);
  return box;
}

function tokenOf(turn, at, sampled, view) {
  const text = turn.texts[at];
  const node = document.createElement("span");
  const look = text === null ? " raw" : text === "" ? " empty" : SPECIAL.test(text) ? " special" : "";
  node.className = `t ${colourOf(turn, sampled, view)}${look}`;
  node.dataset.at = at;
  node.dataset.sampled = sampled;
  node.append(...(text === null ? [String(turn.ids[at])] : readable(text)));
  return node;
}

function colourOf(turn, sampled, { colour, versions }) {
  if (colour === "mask") return sampled < 0 ? "m0" : "m1";
  if (sampled < 0) return "";
  if (colour === "version") return `v${versions.indexOf(turn.v[sampled]) % 6}`;
  if (colour === "advantage") return !turn.advantage ? "a-none" : turn.advantage > 0 ? "a-good" : "a-bad";
  const value = turn.lp[sampled];
  if (value === null) return "p6";
  const step = STEPS.findIndex((least) => value >= least);
  return `p${step < 0 ? STEPS.length : step}`;
}

// One tooltip for a host: by pointer, by arrows in a stretch, by touch.
const tips = new WeakMap(), SCROLLS = { capture: true, passive: true };
function tooltipOf(host) {
  if (tips.has(host)) return tips.get(host);
  const node = make("div", { class: "tip", role: "status", "aria-live": "polite", hidden: true });
  let on = null;
  // Listens to scrolls only while a token is shown: a view that is left leaves no listener behind.
  const scrolled = () => { if (!host.isConnected || !host.contains(document.activeElement)) hide(); };
  const hide = () => { removeEventListener("scroll", scrolled, SCROLLS); on?.classList.remove("on"); on = null; node.hidden = true; };
  const show = (token, scroll) => {
    if (on === token) return;
    hide();
    on = token;
    addEventListener("scroll", scrolled, SCROLLS);
    token.classList.add("on");
    node.replaceChildren(...describe(token));
    node.hidden = false;
    if (scroll) token.scrollIntoView({ block: "nearest" });
    const box = (token.getClientRects()[0] ?? token.getBoundingClientRect());
    const own = node.getBoundingClientRect();
    node.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    node.style.top = `${box.bottom + 8 + own.height > innerHeight ? Math.max(8, box.top - own.height - 8) : box.bottom + 8}px`;
  };
  const tokenAt = (event) => event.target.closest?.(".t");
  host.addEventListener("pointermove", (event) => { const token = tokenAt(event); if (token) show(token); else if (event.pointerType === "mouse" && !host.contains(document.activeElement)) hide(); });
  host.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  host.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (!token) return;
    token.closest(".stretch").focus({ preventScroll: true });
    show(token);
  });
  host.addEventListener("focusin", (event) => { const box = event.target.closest?.(".stretch"); if (box && box === event.target && !box.contains(on) && box.matches(":focus-visible")) { const first = box.querySelector(".t"); if (first) show(first); } });
  host.addEventListener("focusout", hide);
  host.addEventListener("keydown", (event) => {
    const box = event.target.closest?.(".stretch");
    if (!box || box !== event.target || event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) { if (event.key === "Escape" && on) { hide(); event.preventDefault(); event.stopPropagation(); } return; }
    event.preventDefault();
    event.stopPropagation();
    const all = box.querySelectorAll(".t");
    const now = box.contains(on) ? [...all].indexOf(on) : -1;
    show(all[Math.max(0, Math.min(all.length - 1, now + move))], true);
  });
  const found = { node, hide };
  tips.set(host, found);
  return found;
}

function describe(token) {
  const turn = token.closest(".stretch").turn;
  const at = Number(token.dataset.at), sampled = Number(token.dataset.sampled);
  const rows = [["id", String(turn.ids[at])], ["position", (turn.before + at).toLocaleString("en-US")]];
  if (sampled >= 0) {
    const value = turn.lp[sampled];
    const chance = value === null ? null : 100 * Math.exp(value);
    rows.push(["logprob", value === null ? "not a finite number" : `${number(value)}  (${chance >= 1 ? chance.toFixed(1) : chance.toPrecision(2)}%)`],
      ["version", String(turn.v[sampled])], ["advantage", turn.advantage === null ? "not trained on" : number(turn.advantage)], ["reward of the turn", turn.reward === null ? "–" : number(turn.reward)]);
  } else rows.push(["mask", "prompt, not trained on"]);
  const text = turn.texts[at];
  return [make("div", { class: "tok" }, text === null ? `token ${turn.ids[at]}` : readable(JSON.stringify(text), 200)),
    make("table", {}, make("tbody", {}, rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)))))];
}

// Rewards in bins, as buttons: a bin filters. `onPick(from, to)`, or onPick(null) to take the filter away.
export function histogramOf(rewards, { from = null, to = null, onPick, count = 24 } = {}) {
  const known = rewards.filter((each) => each !== null && Number.isFinite(each));
  if (!known.length) return make("p", { class: "dim" }, "no rewards");
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  const parts = low === high ? 1 : Math.min(count, Math.max(2, new Set(known).size > count ? count : new Set(known).size));
  const width = (high - low) / parts || 1;
  const bins = new Array(parts).fill(0);
  for (const each of known) bins[Math.min(parts - 1, Math.floor((each - low) / width))] += 1;
  const most = Math.max(...bins);
  const bars = bins.map((size, at) => {
    const [begin, end] = [low + at * width, at === parts - 1 ? high : low + (at + 1) * width];
    const picked = from !== null && begin >= from - 1e-9 && begin <= to - 1e-9 + (low === high ? 1 : 0);
    const bar = make("button", { type: "button", "aria-pressed": String(picked), disabled: size === 0, title: `${plural(size, "sample")}: reward ${number(begin)} to ${number(end)}`,
      "aria-label": `${plural(size, "sample")} with a reward from ${number(begin)} to ${number(end)}`, onclick: () => onPick?.(picked ? null : begin, end) }, make("i", {}));
    bar.firstChild.style.height = `${size ? Math.max(2, (44 * size) / most) : 0}px`;
    return bar;
  });
  return make("div", { class: "histogram", role: "group", "aria-label": "rewards: a bar filters" }, make("div", { class: "bars" }, bars),
    make("div", { class: "axis" }, make("span", {}, number(low)), make("span", {}, `reward, up to ${plural(most, "sample")}`), make("span", {}, number(high))));
}
