// The shell: the bar, alerts, keys, the token, and the view of the present address.
import { html, render, useState, useEffect, useErrorBoundary, useRoute, useData, useAbout, setAbout, Link, Loading, go, activeKeys, isField, currentRoute } from "./ui.js";
import { call, live, onLive, onRefused, setToken } from "./api.js";
import { RunningAction } from "./actions.js";
import { routes } from "./routes.js";

const loaded = new Map();
let theme = localStorage.getItem("areal-theme") || "";
document.documentElement.dataset.theme = theme;

function load(view) {
  if (!loaded.has(view)) {
    const entry = routes.find((each) => each.view === view);
    loaded.set(view, Promise.all([import(`./views/${view}.js`), entry?.css ? style(`/static/views/${entry.css}.css`) : null]).then(([module]) => module));
  }
  return loaded.get(view);
}

function style(href) {
  return new Promise((done) => {
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href, onload: done, onerror: done });
    document.head.append(link);
  });
}

function App() {
  const route = useRoute();
  const about = useAbout();
  const [asks, setAsks] = useState(false);
  const [help, setHelp] = useState(false);
  const [, redraw] = useState(0);
  useEffect(() => onRefused(() => setAsks(true)), []);
  useEffect(() => onLive(() => redraw((n) => n + 1)), []);
  useEffect(() => listen(setHelp), []);
  useEffect(() => { call("about").then(({ data }) => setAbout(data), () => {}); }, []); // its failure is the view's too
  const turn = () => {
    const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    theme = dark ? "light" : "dark";
    localStorage.setItem("areal-theme", theme);
    document.documentElement.dataset.theme = theme;
  };
  if (asks) return html`<main><${AskToken} done=${() => { setAsks(false); location.reload(); }} /></main>`;
  return html`
    <header class="top">
      <${Link} class="brand" href="/">areal<//>
      <nav aria-label="Views">${routes.filter((each) => each.nav && isShown(about, each)).map((each) => html`
        <${Link} key=${each.view} href=${each.path} aria-current=${each.view === route.view ? "page" : undefined}>${each.nav}<//>`)}</nav>
      <div class="tools">
        ${about?.gateway && html`<span class="mono dim hide-820">${about.gateway}</span>`}
        ${!live.connected && live.since > 0 && html`<span class="bad" role="status">not connected since ${new Date(live.since).toTimeString().slice(0, 8)}</span>`}
        <button type="button" onClick=${turn} aria-label="Light or dark" title="light or dark">◐</button>
        <button type="button" onClick=${() => setHelp(true)} aria-label="Keys" title="keys (?)">?</button>
      </div>
    </header>
    <${Alerts} />
    ${about?.actions && html`<${RunningAction} />`}
    <main tabindex="-1"><${View} key=${route.path} route=${route} /></main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

const isShown = (about, route) => !about || about.views.includes(route.view);

const FEW_ALERTS = 2; // the bar is on every page

function Alerts() {
  const { data, error } = useData("alerts", {});
  const [all, setAll] = useState(false);
  if (error && error.status !== 404 && error.status !== 0) return html`<ul class="alerts" aria-label="Alerts"><li class="error"><b>alerts cannot be read</b> ${error.message}</li></ul>`;
  if (!data?.alerts?.length) return null;
  const ordered = [...data.alerts].sort((a, b) => (b.severity === "error") - (a.severity === "error"));
  const left = ordered.length - FEW_ALERTS;
  return html`<ul class="alerts" aria-label="Alerts">${ordered.slice(0, all || left <= 0 ? undefined : FEW_ALERTS).map((alert) => html`
    <li key=${`${alert.object} ${alert.rule}`} class=${alert.severity}>
      <b class=${alert.severity === "error" ? "bad" : "warn"}>${alert.rule}</b>
      ${alert.route ? html`<${Link} href=${alert.route}>${alert.object}<//>` : html`<span>${alert.object}</span>`}
      <span>${alert.message}</span> <span class="dim hide-560">${alert.cause}</span> ${alert.next && html`<code class="dim hide-560">${alert.next}</code>`}
    </li>`)}${left > 0 && html`<li class="more"><button type="button" onClick=${() => setAll(!all)}>${all ? "the worst alone" : `${left} more ${left === 1 ? "alert" : "alerts"}`}</button></li>`}</ul>`;
}

function View({ route }) {
  const [module, setModule] = useState(null);
  const [failed, setFailed] = useState(null);
  const [broken] = useErrorBoundary();
  useEffect(() => {
    let gone = false;
    if (route.view) load(route.view).then((found) => gone || setModule(found), (error) => gone || setFailed(error));
    return () => { gone = true; };
  }, [route.view]);
  useEffect(() => failed ? onLive(() => live.connected && location.reload()) : undefined, [failed]); // browsers keep a failed import
  useEffect(() => {
    const name = module?.title?.(route);
    document.title = name ? `${name} · areal` : "areal";
    if (module || failed || broken) document.body.dataset.shown = route.path; // its keys are heard from now on
  }, [module, failed, broken, route]);
  if (!route.view) return html`<${Loading} error=${{ type: "NotFound", message: `there is no page ${route.path}`, hint: "esc goes to the objects" }} />`;
  if (failed || broken) return html`<${Loading} error=${{ message: `the view failed: ${(failed || broken).message}`, hint: failed ? "it is loaded again when the server answers" : "reload the page" }} />`;
  return module && html`<${module.default} route=${route} />`;
}

function AskToken({ done }) {
  const [wrong, setWrong] = useState("");
  const enter = async (event) => {
    event.preventDefault();
    setToken(new FormData(event.target).get("token"));
    try { await call("home"); done(); } catch (error) { setWrong(error.status === 401 ? "this is not the token of the server that runs now" : error.message); }
  };
  return html`<form class="token" onSubmit=${enter}>
    <h1>This page needs its token</h1>
    <label>Paste the address or the token that <code>areal ui</code> printed
      <input name="token" type="password" autocomplete="off" autofocus required /></label>
    ${wrong && html`<p class="bad" role="alert">${wrong}</p>`}
    <button type="submit">Open</button>
  </form>`;
}

const COMMON = [
  ["?", "these keys"], ["/", "filter"], ["j k ↓ ↑", "next, previous"], ["Home End PgUp PgDn", "first, last, a page"],
  ["Enter", "open"], ["Esc", "up, or out of a field"],
];

function Help({ close }) {
  const show = (element) => { if (element && !element.open) element.showModal(); };
  const rows = (pairs) => pairs.map(([key, help]) => html`<tr key=${key}><td>${key.split(" ").map((each) => html`<kbd>${each}</kbd> `)}</td><td>${help}</td></tr>`);
  const about = useAbout();
  const goes = routes.filter((each) => each.key && isShown(about, each)).map((each) => [`g ${each.key}`, each.help]);
  const own = activeKeys().map((each) => [each.key, each.help]);
  return html`<dialog ref=${show} onClose=${close} aria-labelledby="keys-title">
    <div class="row"><h1 id="keys-title" class="grow">Keys</h1><button type="button" onClick=${close}>Close</button></div>
    <table><tbody>${rows(COMMON)}${rows(goes)}${rows(own)}</tbody></table>
  </dialog>`;
}

// -- keys of every view

let waitsForLetter = 0;

function activeTable() {
  return (document.activeElement?.closest?.("[data-table]") ?? document.querySelector("main [data-table]"))?.controls?.current;
}

// Keys that were pressed before their view was there. They are heard, in their order, once it is; Esc forgets them.
const early = [];
const KEPT_MS = 10000;
let replaying = false;
const isReady = () => !currentRoute().view || (document.body.dataset.shown === location.pathname && !document.querySelector("main [data-loading]"));

function waits(event) {
  const { key } = event;
  if (!event.isTrusted || (!early.length && isReady())) return false; // `press` makes events that are not trusted
  if (key === "Escape") { early.length = 0; return false; }
  if (!early.length && (key === "g" || key === "?" || waitsForLetter)) return false; // these need no view
  if (/^(Shift|Control|Alt|Meta|Tab|F\d+)/.test(key)) return false;
  early.push({ key, shiftKey: event.shiftKey, at: Date.now() });
  event.preventDefault();
  if (early.length === 1) new MutationObserver(replay).observe(document.body, { subtree: true, childList: true, attributes: true, attributeFilter: ["data-shown"] });
  return true;
}

function replay(changes, observer) {
  if (!early.length) { observer.disconnect(); return; }
  if (replaying || !isReady()) return;
  replaying = true;
  requestAnimationFrame(() => { // what the last key did is on the page
    while (early.length && Date.now() - early[0].at > KEPT_MS) early.shift();
    const next = isReady() ? early.shift() : null;
    if (next) press(next);
    replaying = false;
    replay(changes, observer);
  });
}

function press({ key, shiftKey }) {
  const target = document.activeElement ?? document.body;
  if (isField(target) && key.length === 1) {
    target.setRangeText(key, target.selectionStart, target.selectionEnd, "end");
    target.dispatchEvent(new Event("input", { bubbles: true }));
  } else target.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey, bubbles: true, cancelable: true }));
}

function listen(setHelp) {
  const heard = async (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const { key, target } = event;
    if (early.length && isField(target) && (key.length === 1 || key === "Enter") && waits(event)) return; // behind the earlier ones
    if (isField(target)) {
      if (key === "Escape") { event.preventDefault(); target.blur(); document.querySelector('main tr[tabindex="0"]')?.focus(); }
      if (key === "Enter" && target.matches("[data-filter]")) document.querySelector('main tr[tabindex="0"]')?.focus();
      return;
    }
    if (waits(event)) return;
    if (await handled(event, key, target, setHelp)) return;
  };
  document.addEventListener("keydown", heard);
  return () => document.removeEventListener("keydown", heard);
}

function handled(event, key, target, setHelp) {
  const take = () => { event.preventDefault(); return true; };
  if (waitsForLetter && Date.now() - waitsForLetter < 3000) {
    waitsForLetter = 0;
    const entry = routes.find((each) => each.key === key);
    if (entry) { go(entry.path); return take(); }
  }
  const presses = key === "Enter" && target.closest?.("a,button,summary"); // what has the focus
  const own = presses ? null : activeKeys().findLast((each) => each.key === key);
  if (own && !target.closest?.("[data-table]")) { own.run(event); return take(); }
  const table = activeTable();
  if (table) {
    const page = Math.max(5, Math.floor(document.querySelector("main").clientHeight / 30) - 3);
    const to = { j: table.index + 1, ArrowDown: table.index + 1, k: table.index - 1, ArrowUp: table.index - 1, Home: 0, End: table.count - 1, PageDown: table.index + page, PageUp: table.index - page }[key];
    if (to !== undefined) { table.select(to); return take(); }
    if (key === "Enter" && !presses) { table.open(); return take(); }
  }
  if (key === "?") { setHelp(true); return take(); }
  if (key === "/") { const filter = document.querySelector("[data-filter]"); if (filter) { filter.focus(); filter.select?.(); return take(); } }
  if (key === "g") { waitsForLetter = Date.now(); return take(); }
  if (own) { own.run(event); return take(); }
  if (key === "Escape") {
    const route = currentRoute();
    loaded.get(route.view)?.then((module) => { const up = module.up ? module.up(route) : "/"; if (up !== location.pathname + location.search) go(up); });
    if (!route.view) go("/");
    return take();
  }
  return false;
}

render(html`<${App} />`, document.getElementById("app"));
