// What views are built from: the router, data that stays live, keys, the table, and forms of numbers.
import { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useErrorBoundary } from "./vendor/preact/standalone.module.js";
import { call, callParts, watch, queryText } from "./api.js";
import { match } from "./routes.js";
import { age, bytes, duration, num, number } from "./numbers.js";

export { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useErrorBoundary, call, callParts };

// -- the address: all state of a view

const routed = new Set();

export function currentRoute() {
  const found = match(location.pathname);
  const query = Object.fromEntries(new URLSearchParams(location.search));
  return { view: found?.view ?? null, params: found?.params ?? {}, nav: found, query, path: location.pathname };
}

function announce() { routed.forEach((run) => run(currentRoute())); }
addEventListener("popstate", announce);

// Leaves for another view; the back button returns.
export function go(path) {
  flushSelection();
  history.pushState(null, "", path);
  announce();
}

// Changes the query of the present view; null removes a parameter.
export function setQuery(changes, { quiet = false } = {}) {
  const query = { ...currentRoute().query };
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "" || value === false) delete query[name];
    else query[name] = String(value);
  }
  const text = queryText(query);
  history.replaceState(history.state, "", location.pathname + (text ? "?" + text : ""));
  if (!quiet) announce();
}

export function useRoute() {
  const [route, set] = useState(currentRoute);
  useEffect(() => { routed.add(set); return () => routed.delete(set); }, []);
  return route;
}

export function Link({ href, children, ...rest }) {
  const follow = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey || event.button) return;
    event.preventDefault();
    event.stopPropagation();
    go(href);
  };
  return html`<a href=${href} onClick=${follow} ...${rest}>${children}</a>`;
}

// A remote gateway has no files of its objects: a model leads to its chat, a service to its sessions.
export const objectPath = (ref, query) => {
  const [kind, name] = ref.split("/");
  if (known?.gateway) return kind === "Model" ? `/chat?${queryText({ a: `remote/${name}` })}` : sessionsPath(kind, name);
  const path = kind === "TrainJob" ? `/job/${name}` : `/object/${kind.toLowerCase()}/${name}`;
  return query ? `${path}?${queryText(query)}` : path;
};
export const sessionsPath = (kind, name, session) => `/${kind.toLowerCase() === "agentservice" ? "agents" : "sessions"}/${name}${session ? `/session/${encodeURIComponent(session)}` : ""}`;
export const logsPath = (ref) => { const [kind, name] = ref.split("/"); return `/logs/${kind.toLowerCase()}/${name}`; };

// -- what the server shows and may change: { views, actions, gateway }, null until it has answered

let known = null;
const knowing = new Set();
export function setAbout(found) { known = found; knowing.forEach((run) => run(found)); }
export function useAbout() {
  const [about, set] = useState(known);
  useEffect(() => { set(known); knowing.add(set); return () => knowing.delete(set); }, []);
  return about;
}

// -- data

// { data, error, loading, reload } of GET /api/view, read again when its cursors change. Until another query is answered,
// `data` is that of the query before, and `isCurrent` false. `merge(old, more)`: what comes after data.cursor is asked for
// and joined to what is there.
export function useData(view, query, { merge } = {}) {
  const key = `${view}?${queryText(query)}`;
  const [state, set] = useState({ key, data: null, error: null, loading: true });
  const now = useRef({});
  useEffect(() => {
    const self = (now.current = { stopped: false, busy: false, again: false, marks: null, data: null, reload: null });
    const abort = new AbortController();
    async function read() {
      if (self.busy) { self.again = true; return; }
      self.busy = true;
      self.again = false;
      try {
        const more = merge && self.data?.cursor !== undefined;
        const found = await call(view, more ? { ...query, after: self.data.cursor } : query, { signal: abort.signal });
        if (self.stopped) return;
        self.data = more ? merge(self.data, found.data) : found.data;
        self.marks = found.marks;
        set({ key, data: self.data, error: null, loading: false });
      } catch (error) {
        if (self.stopped || error.name === "AbortError") return;
        set((old) => ({ key, data: old.key === key ? old.data : null, error, loading: false }));
      } finally {
        self.busy = false;
        if (self.again && !self.stopped) setTimeout(() => !self.stopped && read(), 200);
      }
    }
    self.reload = read;
    set((old) => ({ ...old, loading: true }));
    read();
    const stop = watch(view, query, ({ all, marks }) => {
      if (all && self.busy && !self.marks) return; // the first read is under way and brings its own
      const same = all && self.marks && Object.keys({ ...marks, ...self.marks }).every((name) => marks[name] === self.marks[name]);
      if (!same) read();
    });
    return () => { self.stopped = true; abort.abort(); stop(); };
  }, [key]);
  const reload = useCallback(() => now.current.reload?.(), []);
  return { ...state, isCurrent: state.key === key, reload };
}

export function Problem({ error }) {
  return html`<div class="problem" role="alert">
    <pre>${error.message}</pre>
    ${error.hint && html`<p class="hint">${error.hint}</p>`}
  </div>`;
}

// Stands where a view's data is not there yet, or cannot be read.
export function Loading({ error }) {
  const name = { NotFound: "Not found", UsageFault: "This address cannot be read", Unreachable: "No answer" }[error?.type] ?? "It cannot be shown";
  return error ? html`<h1>${name}</h1><${Problem} error=${error} />` : html`<p class="empty" role="status" data-loading>Loading</p>`;
}

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

// -- keys

const keyed = []; // sets of keys of what is mounted, the newest last
export const activeKeys = () => keyed.flatMap((set) => set.current);

// keys: [{ key, help, run }]; not heard while a field has the focus.
export function useKeys(keys) {
  const held = useRef(keys);
  held.current = keys;
  useEffect(() => {
    keyed.push(held);
    return () => { keyed.splice(keyed.indexOf(held), 1); };
  }, []);
}

export const isField = (element) => /^(INPUT|TEXTAREA|SELECT)$/.test(element?.tagName ?? "") || element?.isContentEditable;

export function Filter({ value, placeholder = "filter", label = "Filter", name = "q" }) {
  const change = (event) => setQuery({ [name]: event.target.value });
  return html`<input type="search" data-filter value=${value ?? ""} onInput=${change} placeholder=${`${placeholder}  (/)`} aria-label=${label} autocomplete="off" spellcheck=${false} />`;
}

// A switch in the address: `flip` of its key and its button change it.
export const flip = (name, on) => () => setQuery({ [name]: on ? null : 1 });
export const Toggle = ({ name, on, children }) => html`<button type="button" aria-pressed=${String(Boolean(on))} onClick=${flip(name, on)}>${children}</button>`;

// -- the table

let pendingSelection = null;
function flushSelection() {
  if (!pendingSelection) return;
  clearTimeout(pendingSelection.timer);
  const { name, key, path } = pendingSelection;
  pendingSelection = null;
  if (location.pathname === path) setQuery({ [name]: key }, { quiet: true });
}

const WINDOW = 500; // rows above which only those near the screen are built
const ROW = 28;

// rows of objects; columns: { id, title, value(row), cell?(row), search?(row), num?,
// sort?: false, hide?: width, optional?: left out where no row has a value }. Moves by j k arrows Home End PageUp PageDown,
// opens by Enter: href(row), to which the first column is a link, or onOpen(row). The selected row is in the address (`name`), is
// scrolled into view, and keeps the focus when rows change.
export function Table({ label, columns: every, rows, rowKey, href, onOpen, note, filterText, name = "at", sortName = "sort", caption, empty = "nothing to show", focus = false }) {
  const route = currentRoute();
  const body = useRef(null);
  const [, redraw] = useState(0);
  const sort = route.query[sortName] ?? "";
  const columns = useMemo(() => every.filter((column) => !column.optional || rows.some((row) => has(column.value(row)))), [every, rows]);
  const shown = useMemo(() => order(filtered(rows, columns, filterText), columns, sort), [rows, filterText, sort]);
  const selected = useRef({ key: route.query[name], index: 0 });
  const keys = shown.map(rowKey);
  let index = keys.indexOf(selected.current.key);
  if (index < 0) index = Math.min(selected.current.index, shown.length - 1);
  const select = (to, { scroll = true } = {}) => {
    const at = Math.max(0, Math.min(shown.length - 1, to));
    if (!shown.length) return;
    selected.current = { key: keys[at], index: at, focus: true, scroll };
    clearTimeout(pendingSelection?.timer);
    pendingSelection = { name, key: keys[at], path: location.pathname, timer: setTimeout(flushSelection, 400) };
    redraw((n) => n + 1);
  };
  const open = (at) => { if ((href ?? onOpen) && shown[at]) { select(at, { scroll: false }); href ? go(href(shown[at])) : onOpen(shown[at]); } };
  const content = (column, row) => {
    if (column.cell) return column.cell(row);
    const words = text(column.value(row));
    return href && column === columns[0] ? html`<${Link} tabindex="-1" href=${href(row)}>${words}<//>` : words;
  };
  const controls = useRef(null);
  controls.current = { index, count: shown.length, select, open: () => open(index) };
  const heads = shown.length > WINDOW;
  const [from, setFrom] = useState(0);
  const first = heads ? Math.max(0, Math.min(from, shown.length - 120)) : 0;
  const last = heads ? Math.min(shown.length, first + 160) : shown.length;
  useEffect(() => {
    if (!heads) return undefined;
    const main = document.querySelector("main");
    const look = () => {
      const above = main.getBoundingClientRect().top - body.current.getBoundingClientRect().top;
      const next = Math.max(0, Math.floor((above / ROW - 40) / 40) * 40);
      setFrom(next);
    };
    main.addEventListener("scroll", look, { passive: true });
    look();
    return () => main.removeEventListener("scroll", look);
  }, [heads]);
  useLayoutEffect(() => {
    const want = selected.current;
    if (!want.focus) return;
    const row = body.current?.querySelector(`tr[data-at="${index}"]`);
    if (!row && heads) { setFrom(Math.max(0, index - 60)); return; }
    selected.current = { ...want, focus: false };
    if (!row) return;
    row.focus({ preventScroll: true });
    if (want.scroll) reveal(row);
  });
  useEffect(() => { // a row that is rebuilt or gone takes the focus with it
    const element = body.current?.closest("[data-table]");
    element.controls = controls;
    if (focus && (document.activeElement === document.body || document.activeElement === null || document.activeElement.tagName === "MAIN")) {
      const row = body.current.querySelector('tr[tabindex="0"]');
      row?.focus({ preventScroll: true });
      if (row && index > 0) reveal(row);
    }
  });
  const head = (column) => {
    if (column.sort === false) return column.title;
    const way = sort === column.id ? "ascending" : sort === `-${column.id}` ? "descending" : undefined;
    const next = way === "ascending" ? `-${column.id}` : way === "descending" ? null : column.id;
    return html`<button type="button" onClick=${() => setQuery({ [sortName]: next })} title=${`sort by ${column.title}`}>${column.title}${way ? (way === "ascending" ? " ↑" : " ↓") : ""}</button>`;
  };
  const classes = (column) => [column.num && "num", column.hide && `hide-${column.hide}`, column.cls].filter(Boolean).join(" ") || undefined;
  const ariaSort = (column) => sort === column.id ? "ascending" : sort === `-${column.id}` ? "descending" : undefined;
  return html`<div class=${`scroll${focus ? " main" : ""}`} data-table>
    <table aria-label=${caption ? undefined : label} aria-rowcount=${heads ? shown.length : undefined}>
      ${caption && html`<caption>${caption}</caption>`}
      <thead><tr>${columns.map((column) => html`<th key=${column.id} scope="col" class=${classes(column)} aria-sort=${ariaSort(column)}>${head(column)}</th>`)}</tr></thead>
      <tbody ref=${body}>
        ${first > 0 && html`<tr key="above" aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${first * ROW}px`, padding: 0 }}></td></tr>`}
        ${shown.slice(first, last).map((row, offset) => {
          const at = first + offset;
          const below = note?.(row);
          return html`
            <tr key=${keys[at]} data-at=${at} tabindex=${at === index ? 0 : -1} aria-current=${at === index ? "true" : undefined} aria-rowindex=${heads ? at + 1 : undefined}
              onClick=${(event) => { if (!event.target.closest("a,button") && !String(getSelection())) open(at); }} onFocus=${() => { if (at !== index) select(at, { scroll: false }); }}>
              ${columns.map((column) => html`<td key=${column.id} class=${classes(column)}>${content(column, row)}</td>`)}
            </tr>
            ${below && html`<tr key=${`${keys[at]} note`} class="note"><td colspan=${columns.length}>${below}</td></tr>`}`;
        })}
        ${last < shown.length && html`<tr key="below" aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${(shown.length - last) * ROW}px`, padding: 0 }}></td></tr>`}
      </tbody>
    </table>
    ${!shown.length && html`<p class="empty">${rows.length ? `none of ${rows.length} matches the filter` : empty}</p>`}
  </div>`;
}

// Scrolls the row into view, with room for the head of the page and for a note below.
function reveal(row) {
  const main = row.closest("main");
  if (!main) return;
  const box = row.getBoundingClientRect();
  const view = main.getBoundingClientRect();
  const below = row.nextElementSibling?.classList.contains("note") ? row.nextElementSibling.offsetHeight : 0;
  if (box.top < view.top + 30) main.scrollTop -= view.top + 30 - box.top;
  else if (box.bottom + below > view.bottom - 12) main.scrollTop += box.bottom + below - view.bottom + 12;
}

const has = (value) => value !== null && value !== undefined && value !== "" && value !== 0;
const text = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));

function filtered(rows, columns, words) {
  const terms = (words ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (!terms.length) return rows;
  return rows.filter((row) => {
    const all = columns.map((column) => text((column.search ?? column.value)(row))).join(" ").toLowerCase();
    return terms.every((term) => all.includes(term));
  });
}

function order(rows, columns, sort) {
  const column = columns.find((each) => each.id === sort.replace(/^-/, ""));
  if (!column) return rows;
  const way = sort.startsWith("-") ? -1 : 1;
  const missing = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);
  return [...rows].sort((a, b) => {
    const [one, other] = [column.value(a), column.value(b)];
    if (missing(one) || missing(other)) return missing(one) - missing(other); // always last
    return way * (typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true }));
  });
}

// -- small things

const GOOD = new Set(["Ready", "Running", "Succeeded", "Normal", "running", "True", "routable"]);
const BAD = new Set(["Failed", "Lost", "Unknown", "crashloop", "dead", "exited", "blocked"]);
export const tone = (state) => (GOOD.has(state) ? "ok" : BAD.has(state) ? "bad" : /^(Suspended|Stopped|Pending|Queued|stopped|idle|active|ended|removed)$/.test(state) ? "" : "warn");
export const State = ({ value }) => html`<span class=${`state ${tone(value)}`}>${value}</span>`;

export { num };

export const fmt = {
  number, duration, bytes, age,
  ago: (at) => (at ? `${age(Date.now() / 1000 - at)} ago` : ""),
  clock(at) {
    if (!at) return "";
    const date = new Date(at * 1000);
    const time = date.toTimeString().slice(0, 8);
    return date.toDateString() === new Date().toDateString() ? time : `${date.toISOString().slice(0, 10)} ${time}`;
  },
};
