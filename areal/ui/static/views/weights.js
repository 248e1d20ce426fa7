// `/weights`: the version of each replica, now and over time, which are behind, the pairs, and the updates of the jobs.
import { html, useData, useEffect, useKeys, useMemo, useState, call, setQuery, Table, Link, Loading, Problem, State, fmt, go, objectPath } from "../ui.js";
import { Spark } from "../spark.js";

export const title = () => "weights";

export default function Weights({ route }) {
  const { data, error } = useData("weights", {});
  const [counted, setCounted] = useState(null);
  const newest = data?.updates[0] ? `${data.updates[0].job} ${data.updates[0].step}` : "";
  const span = route.query.span in SPANS ? route.query.span : "all";
  const lanes = useMemo(() => (data ? lanesOf(data, SPANS[span]) : null), [data, span]);
  useEffect(() => { if (data?.ofHome) call("weights", { tokens: 1 }).then((found) => setCounted(found.data.jobs), () => {}); }, [data?.ofHome, newest]);
  useKeys([{ key: "s", help: "span of time: all, day, hour, ten minutes", run: () => { const names = Object.keys(SPANS); setQuery({ span: names[(names.indexOf(span) + 1) % names.length].replace("all", "") }); } }]);
  if (!data) return html`<h1>Weights</h1><${Loading} error=${error} />`;
  const behind = data.replicas.filter((row) => row.behind > 0).length;
  const timed = [...data.updates].filter((row) => row.at).reverse();
  return html`
    <div class="head"><h1>Weights</h1><span class="facts"><span><b>${data.replicas.length}</b> ${data.replicas.length === 1 ? "replica" : "replicas"}</span>
      <span><b class=${behind ? "bad" : ""}>${behind}</b> behind</span>
      ${timed.length > 1 && html`<span>last ${timed.length} updates <${Spark} at=${timed.map((row) => row.at)} values=${timed.map((row) => row.ms)} width=${120} /></span>`}</span></div>
    ${error && html`<${Problem} error=${error} />`}
    ${data.unseen.map((sentence) => html`<p class="warn" key=${sentence}>${sentence}</p>`)}
    <${Table} focus label="Replicas" caption="Replicas, now" columns=${REPLICAS} rows=${data.replicas} rowKey=${(row) => row.worker} onOpen=${(row) => go(objectPath(`InferenceService/${row.service}`))} empty="no service runs" />
    ${lanes.rows.length > 0 && html`<${Timeline} lanes=${lanes} span=${span} />`}
    ${data.pairs.length > 0 && html`<${Table} label="Pairs" caption="Pairs of a trainer and a service" name="pair" sortName="pairsort" columns=${PAIRS} rows=${data.pairs} rowKey=${(row) => `${row.job} ${row.pair_name}`}
      note=${(row) => row.error ? html`<span class="bad">${row.error}</span>` : null} onOpen=${(row) => go(objectPath(`TrainJob/${row.job}`))} />`}
    <${Table} label="Changes" caption="Other swaps, since this view was first opened" name="change" sortName="changesort" columns=${CHANGES} rows=${[...data.changes].reverse()} rowKey=${(row) => `${row.at} ${row.worker}`} empty="no replica has changed its version or state" />
    ${data.history.length > 0 && html`<${Table} label="History" caption="Recorded updates, newest first" name="entry" sortName="entrysort" columns=${HISTORY} rows=${[...data.history].reverse()} rowKey=${(row) => `${row.at} ${row.pair}`} note=${(row) => (row.error ? html`<span class="bad">${row.error}</span>` : null)} onOpen=${(row) => go(objectPath(`TrainJob/${row.job}`))} />`}
    ${counted?.length > 0 && html`<${Table} label="Tokens" caption="Tokens sampled by each version, of the jobs' recorded samples" name="sampled" sortName="sampledsort" columns=${COUNTED} rows=${counted.flatMap((job) => job.versions.map((each) => ({ ...job, ...each })))} rowKey=${(row) => `${row.job} ${row.version}`} onOpen=${(row) => go(objectPath(`TrainJob/${row.job}`))} />`}
    ${data.ofHome ? html`<${Table} label="Updates" caption="Updates of the jobs, newest first" name="update" sortName="updatesort" columns=${UPDATES} rows=${data.updates} rowKey=${(row) => `${row.job} ${row.step}`} onOpen=${(row) => go(objectPath(`TrainJob/${row.job}`))} empty="no job has written weights" />` : html`<p class="dim">pairs, updates and samples of jobs are in files of the machine that runs them, which this gateway does not serve</p>`}`;
}

const version = (value) => (value === null || value === undefined ? "" : `v${value}`);
const ms = (value) => (value === null || value === undefined ? "" : fmt.duration(value / 1000));

const SPANS = { all: null, day: 86400, hour: 3600, "10min": 600 };
const MOST_LANES = 40;

// A lane a replica: what it served from when, by the recorded updates; the version that it serves now ends it.
function lanesOf(data, seconds) {
  const names = new Map(data.replicas.map((row) => [row.address, row]));
  const lanes = new Map();
  const lane = (key, title) => { if (!lanes.has(key)) lanes.set(key, { key, title, now: names.get(key), marks: [] }); return lanes.get(key); };
  data.replicas.forEach((row) => lane(row.address, `${row.model} ${row.worker}`));
  const recorded = new Set(data.history.map((each) => each.job));
  for (const each of data.history) {
    for (const [address, pause] of Object.entries(each.replicas)) lane(address, names.has(address) ? lanes.get(address)?.title : `${each.model ?? each.job} ${address.replace(/^https?:\/\//, "")}`).marks.push({ at: each.at, version: each.version, pause, ms: 1000 * (each.at - each.began), job: each.job, joined: each.joined, error: each.error ?? (pause === null ? "it was away" : null) });
  }
  for (const each of [...data.updates].reverse()) if (!recorded.has(each.job) && each.at) lane(`job ${each.job}`, `${each.job} (replicas were not recorded)`).marks.push({ at: each.at, version: each.version, pause: each.pausedMs, ms: each.ms, job: each.job, error: null });
  for (const each of data.changes) if (each.before !== each.version && !lane(each.address, each.worker).marks.some((mark) => mark.version === each.version && Math.abs(mark.at - each.at) < 60)) lane(each.address, each.worker).marks.push({ at: each.at, version: each.version, pause: null, ms: null, error: null });
  const all = [...lanes.values()].flatMap((each) => each.marks);
  const first = Math.min(data.at - 60, ...all.map((mark) => mark.at));
  const from = seconds ? Math.max(first, data.at - seconds) : first;
  const rows = [...lanes.values()].filter((each) => each.marks.length || each.now).map((each) => ({ ...each, ...segmentsOf(each, from, data.at) }));
  return { rows: rows.slice(0, MOST_LANES), leftOut: Math.max(0, rows.length - MOST_LANES), from, to: data.at };
}

function segmentsOf({ marks, now }, from, to) {
  const ordered = [...marks].sort((a, b) => a.at - b.at);
  const swaps = ordered.filter((mark) => mark.error === null);
  const segments = swaps.map((mark, at) => ({ ...mark, from: Math.max(from, mark.at), to: swaps[at + 1]?.at ?? (now || !marks.length ? to : Math.max(mark.at, ordered.at(-1).at)) })).filter((each) => each.to >= from);
  if (!segments.length && now) segments.push({ version: now.version, from, to, pause: null, ms: null });
  return { segments, missed: ordered.filter((mark) => mark.error !== null && mark.at >= from) };
}

const DRAWN = 1000;
function Timeline({ lanes, span }) {
  const x = (at) => (DRAWN * (at - lanes.from)) / Math.max(1, lanes.to - lanes.from);
  const tell = (each) => [version(each.version) || "unknown version", each.job && `of ${each.job}`, each.joined && "it caught up", each.ms !== null && `update ${ms(each.ms)}`, each.pause !== null && `pause ${ms(each.pause)}`, each.at && fmt.clock(each.at)].filter(Boolean).join(", ");
  return html`<section class="panel lanes" aria-label="Versions over time"><h2>Versions over time</h2><div class="pad">
    <div class="bar" role="group" aria-label="Span of time">${Object.keys(SPANS).map((each) => html`<button type="button" key=${each} aria-pressed=${String(each === span)} onClick=${() => setQuery({ span: each === "all" ? null : each })}>${each}</button>`)}<span class="dim">${fmt.clock(lanes.from)} to ${fmt.clock(lanes.to)}</span></div>
    ${lanes.rows.map((row) => html`<div class="lane" key=${row.key}><span class="mono" title=${row.title}>${row.title}</span>
      <svg viewBox=${`0 0 ${DRAWN} 18`} preserveAspectRatio="none" role="img" aria-label=${`${row.title}: ${row.segments.slice(-8).map((each) => `${version(each.version) || "unknown"} from ${fmt.clock(each.from)}`).join(", ")}${row.missed.length ? `; missed ${row.missed.length}` : ""}`}>
        ${row.segments.map((each) => html`<rect key=${`${each.from} ${each.version}`} class=${`w${(each.version ?? 0) % 6}`} x=${x(each.from)} y="2" width=${Math.max(2, x(each.to) - x(each.from))} height="14"><title>${tell(each)}</title></rect>`)}
        ${row.missed.map((each) => html`<rect key=${`missed ${each.at}`} class="missed" x=${x(each.at) - 2} y="0" width="4" height="18"><title>${`${version(each.version)} was not taken: ${each.error}`}</title></rect>`)}
      </svg><span class="num">${version(row.segments.at(-1)?.version)}${row.missed.length ? html` <span class="bad">${row.missed.length} missed</span>` : ""}</span></div>`)}
    ${lanes.leftOut > 0 && html`<p class="dim">${lanes.leftOut} more replicas are not drawn</p>`}</div></section>`;
}

const HISTORY = [
  { id: "version", title: "Version", value: (row) => row.version, num: true, cell: (row) => version(row.version) },
  { id: "job", title: "Job", value: (row) => row.job },
  { id: "at", title: "When", value: (row) => row.at, cls: "nowrap", cell: (row) => fmt.clock(row.at) },
  { id: "ms", title: "Duration", value: (row) => 1000 * (row.at - row.began), num: true, cls: "nowrap", cell: (row) => ms(1000 * (row.at - row.began)) },
  { id: "taken", title: "Taken by", value: (row) => Object.values(row.replicas).filter((each) => each !== null).length, num: true, cell: (row) => `${Object.values(row.replicas).filter((each) => each !== null).length}/${Object.keys(row.replicas).length}${row.joined ? " (caught up)" : ""}` },
  { id: "pause", title: "Longest pause", value: (row) => Math.max(...Object.values(row.replicas).map((each) => each ?? 0)), num: true, cls: "nowrap", hide: 560, cell: (row) => ms(Math.max(...Object.values(row.replicas).map((each) => each ?? 0))) },
  { id: "bytes", title: "Size", value: (row) => row.bytes, num: true, hide: 560, cell: (row) => fmt.bytes(row.bytes) },
];
const COUNTED = [
  { id: "job", title: "Job", value: (row) => row.job },
  { id: "version", title: "Version", value: (row) => row.version, num: true, cell: (row) => version(row.version) },
  { id: "tokens", title: "Tokens", value: (row) => row.tokens, num: true, cell: (row) => fmt.number(row.tokens) },
  { id: "steps", title: "Of steps", value: (row) => row.steps[0], cls: "nowrap", cell: (row) => `${row.steps[0]} to ${row.steps[1]}${row.whole ? "" : " (older ones were not counted)"}` },
];
const REPLICAS = [
  { id: "service", title: "Service", value: (row) => row.service, cell: (row) => html`<${Link} tabindex="-1" href=${objectPath(`InferenceService/${row.service}`)}>${row.service}<//>` },
  { id: "model", title: "Model", value: (row) => row.model },
  { id: "worker", title: "Replica", value: (row) => row.worker, cls: "mono", hide: 820 },
  { id: "version", title: "Version", value: (row) => row.version, num: true, cell: (row) => version(row.version) },
  { id: "behind", title: "Behind", value: (row) => row.behind, num: true, cell: (row) => row.behind ? html`<span class="bad">${row.behind}</span>` : html`<span class="dim">0</span>` },
  { id: "state", title: "State", value: (row) => row.state, cell: (row) => html`<span class=${`state ${row.fault ? "bad" : row.state === "ready" && !row.paused ? "ok" : "warn"}`}>${row.paused ? "paused" : row.state}</span>${row.fault ? html` <span class="bad">${row.fault}</span>` : ""}` },
  { id: "inflight", title: "Calls", value: (row) => row.inFlight, num: true },
  { id: "address", title: "Address", value: (row) => row.address, cls: "mono", hide: 820 },
];
const PAIRS = [
  { id: "job", title: "Job", value: (row) => row.job, cell: (row) => html`<${Link} tabindex="-1" href=${objectPath(`TrainJob/${row.job}`)}>${row.job}<//>` },
  { id: "pair", title: "Pair", value: (row) => row.pair_name },
  { id: "mode", title: "Mode", value: (row) => row.mode },
  { id: "version", title: "Version", value: (row) => row.version, num: true, cell: (row) => version(row.version) },
  { id: "state", title: "State", value: (row) => row.state, cell: (row) => html`<${State} value=${row.state === "connected" ? "Ready" : row.state === "failed" ? "Failed" : row.state} />` },
  { id: "updated", title: "Last update", value: (row) => row.last_update, cls: "nowrap", cell: (row) => fmt.ago(row.last_update) },
  { id: "ms", title: "Duration", value: (row) => row.duration_ms, num: true, cell: (row) => ms(row.duration_ms) },
  { id: "paused", title: "Pause", value: (row) => row.paused_ms, num: true, cell: (row) => ms(row.paused_ms) },
  { id: "bytes", title: "Size", value: (row) => row.bytes, num: true, cell: (row) => fmt.bytes(row.bytes) },
];
const CHANGES = [
  { id: "at", title: "When", value: (row) => row.at, cls: "nowrap", cell: (row) => fmt.clock(row.at) },
  { id: "worker", title: "Replica", value: (row) => row.worker, cls: "mono" },
  { id: "version", title: "Version", value: (row) => row.version, cls: "nowrap", cell: (row) => row.before === row.version ? version(row.version) : `${version(row.before)} → ${version(row.version)}` },
  { id: "state", title: "State", value: (row) => (row.paused ? "paused" : row.state) },
];
const UPDATES = [
  { id: "version", title: "Version", value: (row) => row.version, num: true, cell: (row) => version(row.version) },
  { id: "job", title: "Job", value: (row) => row.job },
  { id: "at", title: "When", value: (row) => row.at, cls: "nowrap", cell: (row) => fmt.clock(row.at) },
  { id: "ms", title: "Duration", value: (row) => row.ms, num: true, cls: "nowrap", cell: (row) => ms(row.ms) },
  { id: "paused", title: "Pause", value: (row) => row.pausedMs, num: true, cls: "nowrap", cell: (row) => ms(row.pausedMs) },
  { id: "tokens", title: "Tokens of the step", value: (row) => row.tokens, num: true, hide: 560, cell: (row) => fmt.number(row.tokens) },
  { id: "staleness", title: "Staleness", value: (row) => row.staleness, num: true, hide: 560, cell: (row) => fmt.number(row.staleness) },
];
