// `/logs/KIND/NAME`: merged lines of an object's processes; older ones on scroll, new ones while it follows.
import { html, useData, useEffect, useKeys, useLayoutEffect, useMemo, useRef, useState, call, Filter, Link, Loading, Problem, Toggle, flip, fmt, go, objectPath, setQuery } from "../ui.js";

export const title = (route) => `logs ${route.params.name}`;
export const up = (route) => `/object/${route.params.kind}/${route.params.name}`;

const MOST = 6000; // lines that are kept while following

export default function Logs({ route }) {
  const { kind, name } = route.params;
  const { component, replica, level, q, previous, wrap } = route.query;
  const asked = useSlow(q, 250);
  const query = { kind, name, component, replica, level, q: asked, previous };
  const { data, error } = useData("logs", query, { merge: joined });
  const key = JSON.stringify(query);
  const [older, setOlder] = useState({ key, pages: [], next: undefined, busy: false });
  const mine = older.key === key ? older : { key, pages: [], next: undefined, busy: false };
  const next = data?.dropped ? null : mine.next === undefined ? data?.older : mine.next;
  const box = useRef(null);
  const follow = useRef(true);
  const [paused, setPaused] = useState(false);
  const [at, setAt] = useState(null);

  const names = useMemo(() => labels(data?.processes ?? []), [data?.processes]);
  const lines = useMemo(() => [...(data?.dropped ? [] : mine.pages.flat()), ...(data?.lines ?? []).map((line) => shown(line, data.processes))], [mine.pages, data]);
  const errors = useMemo(() => lines.flatMap((line, index) => (line.level === "error" ? [index] : [])), [lines]);

  async function more() {
    if (!next || mine.busy) return false;
    setOlder({ ...mine, busy: true });
    const height = box.current.scrollHeight - box.current.scrollTop;
    try {
      const found = await call("logs", { ...query, before: next });
      const page = found.data.lines.map((line) => shown(line, found.data.processes));
      setOlder({ key, pages: [page, ...mine.pages], next: found.data.older, busy: false });
      requestAnimationFrame(() => { if (box.current) box.current.scrollTop = box.current.scrollHeight - height; });
    } catch (failure) { setOlder({ ...mine, busy: false, failed: failure }); }
    return true;
  }

  useLayoutEffect(() => {
    const element = box.current;
    if (element && follow.current) element.scrollTop = element.scrollHeight;
  }, [lines]);
  useEffect(() => { box.current?.focus({ preventScroll: true }); }, [Boolean(data)]);

  const scrolled = () => {
    const element = box.current;
    const end = element.scrollHeight - element.scrollTop - element.clientHeight < 30;
    if (end !== follow.current) { follow.current = end; setPaused(!end); }
    if (element.scrollTop < 200) more();
  };
  const toEnd = () => { follow.current = true; setPaused(false); box.current.scrollTop = box.current.scrollHeight; };
  const by = (amount) => { box.current.scrollTop += amount; };
  const jump = (way) => {
    const from = at ?? (way < 0 ? lines.length : -1);
    const target = way < 0 ? errors.findLast((index) => index < from) : errors.find((index) => index > from);
    if (target === undefined) { if (way < 0) more(); return; }
    setAt(target);
    follow.current = false;
    setPaused(true);
    box.current.children[target + 1]?.scrollIntoView({ block: "center" });
  };
  useKeys([
    { key: "j", help: "down", run: () => by(60) }, { key: "k", help: "up", run: () => by(-60) },
    { key: "ArrowDown", help: "down", run: () => by(60) }, { key: "ArrowUp", help: "up", run: () => by(-60) },
    { key: "PageDown", help: "a page down", run: () => by(box.current.clientHeight - 40) }, { key: "PageUp", help: "a page up", run: () => by(40 - box.current.clientHeight) },
    { key: "Home", help: "older lines", run: () => { box.current.scrollTop = 0; } }, { key: "End", help: "the end, and follow", run: toEnd },
    { key: "f", help: "follow", run: toEnd },
    { key: "e", help: "next error", run: () => jump(1) }, { key: "E", help: "previous error", run: () => jump(-1) },
    { key: "w", help: "wrap lines", run: flip("wrap", wrap) },
    { key: "p", help: "the previous run", run: flip("previous", previous) },
  ]);

  const choose = (parameter) => (event) => setQuery({ [parameter]: event.target.value });
  const head = html`<div class="head"><h1><span class="dim">Logs</span> <${Link} href=${objectPath(refOf(kind, name))}>${name}<//></h1>
    <span class="facts">${data && html`<span><b>${fmt.number(lines.length)}</b> ${lines.length === 1 ? "line" : "lines"}${next ? ", older ones by scrolling" : ""}</span> ${errors.length > 0 && html`<span class="bad">${errors.length} ${errors.length === 1 ? "error" : "errors"}</span>`}`}
      ${data && !previous && (paused ? html`<span class="warn">not following</span>` : html`<span class="ok">following</span>`)}</span></div>`;
  const bar = html`<div class="bar">
    <${Filter} value=${q} label="Filter lines" placeholder="filter lines" />
    <label>component <select onChange=${choose("component")} value=${component ?? ""}><option value="">all</option>${(data?.components ?? []).map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
    ${(data?.replicas ?? []).length > 1 && html`<label>replica <select onChange=${choose("replica")} value=${replica ?? ""}><option value="">all</option>${data.replicas.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>`}
    <label>level <select onChange=${choose("level")} value=${level ?? ""}><option value="">all</option><option value="warning">warning, error</option><option value="error">error</option></select></label>
    <${Toggle} name="previous" on=${previous}>previous run<//>
    <button type="button" onClick=${() => jump(-1)} disabled=${!errors.length && !next}>previous error</button>
    <button type="button" onClick=${() => jump(1)} disabled=${!errors.length}>next error</button>
    <${Toggle} name="wrap" on=${wrap}>wrap lines<//>
    ${paused && html`<button type="button" onClick=${toEnd}>to the end</button>`}
  </div>`;
  if (!data) return html`${head}${bar}<${Loading} error=${error} />`;
  const several = names.size !== 1;
  const width = Math.max(0, ...[...names.values()].map((each) => each.text.length));
  return html`${head}${bar}
    ${error && html`<${Problem} error=${error} />`}
    <div class=${`log ${wrap ? "wrap" : ""}`} ref=${box} tabindex="0" role="log" aria-label=${`Lines of ${name}`} aria-live="off" onScroll=${scrolled}>
      <div class="edge dim">${mine.busy ? "loading older lines" : mine.failed ? mine.failed.message : next ? "older lines: scroll up" : data.dropped ? "older lines are left out while it follows: reload to read them" : previous ? "the run before the present one" : "the beginning of what is kept"}</div>
      ${lines.map((line, index) => html`<${Line} key=${line.id} line=${line} name=${several ? names.get(line.uid) : null} width=${width} current=${index === at} />`)}
      ${!lines.length && html`<p class="empty">${asked || level ? "no line matches" : previous ? "there is no previous run" : data.processes.length ? "no output yet" : "it has no process and no log"}</p>`}
    </div>`;
}

function Line({ line, name, width, current }) {
  return html`<div class=${`line ${line.level}${current ? " current" : ""}`} aria-current=${current ? "true" : undefined}>
    <time>${line.at ? fmt.clock(line.at) : ""}</time>${name && html`<span class=${`who s${name.colour}`} style=${{ minWidth: `${width}ch` }}>${name.text}</span>`}<span class="text">${line.text}${line.cut ? html`<span class="dim"> (${fmt.number(line.cut)} more characters)</span>` : ""}</span></div>`;
}

const refOf = (kind, name) => `${{ inferenceservice: "InferenceService", model: "Model", agentservice: "AgentService", trainjob: "TrainJob" }[kind] ?? kind}/${name}`;

const shown = ([index, at, level, text, place, cut], processes) => ({ uid: processes[index].uid, id: `${processes[index].uid} ${place}`, at, level, text, cut });

// Later lines behind those that are there. Above a limit the oldest are dropped, and then none are asked for before them.
function joined(old, more) {
  const index = new Map(more.processes.map((process, at) => [process.uid, at]));
  const kept = old.lines.slice(Math.max(0, old.lines.length + more.lines.length - MOST)).flatMap(([at, ...rest]) => {
    const now = index.get(old.processes[at].uid);
    return now === undefined ? [] : [[now, ...rest]];
  });
  const dropped = old.dropped || old.lines.length + more.lines.length > MOST;
  return { ...more, dropped, older: dropped ? null : old.older, lines: [...kept, ...more.lines] };
}

// The prefix of each process and its colour; with the object where there are several.
function labels(processes) {
  const owners = new Set(processes.map((process) => process.owner));
  return new Map(processes.map((process, at) => [process.uid, {
    text: `${owners.size > 1 ? process.owner.split("/")[1] + " " : ""}${process.component}/${process.replica}`, colour: (at % 8) + 1,
  }]));
}

// The value once it has not changed for a while.
function useSlow(value, wait) {
  const [slow, set] = useState(value);
  useEffect(() => {
    if (slow === value) return undefined;
    const timer = setTimeout(() => set(value), wait);
    return () => clearTimeout(timer);
  }, [value, slow]);
  return slow;
}
