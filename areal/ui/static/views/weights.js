// `/weights`: the version of each replica, which are behind, the pairs, and the updates of the jobs.
import { html, useData, Table, Link, Loading, Problem, State, fmt, go, objectPath } from "../ui.js";
import { Spark } from "../spark.js";

export const title = () => "weights";

export default function Weights() {
  const { data, error } = useData("weights", {});
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
    ${data.pairs.length > 0 && html`<${Table} label="Pairs" caption="Pairs of a trainer and a service" name="pair" sortName="pairsort" columns=${PAIRS} rows=${data.pairs} rowKey=${(row) => `${row.job} ${row.pair_name}`}
      note=${(row) => row.error ? html`<span class="bad">${row.error}</span>` : null} onOpen=${(row) => go(objectPath(`TrainJob/${row.job}`))} />`}
    <${Table} label="Changes" caption="Swaps, since this view was first opened" name="change" sortName="changesort" columns=${CHANGES} rows=${[...data.changes].reverse()} rowKey=${(row) => `${row.at} ${row.worker}`} empty="no replica has changed its version or state" />
    <${Table} label="Updates" caption="Updates of the jobs, newest first" name="update" sortName="updatesort" columns=${UPDATES} rows=${data.updates} rowKey=${(row) => `${row.job} ${row.step}`} onOpen=${(row) => go(objectPath(`TrainJob/${row.job}`))} empty="no job has written weights" />`;
}

const version = (value) => (value === null || value === undefined ? "" : `v${value}`);
const ms = (value) => (value === null || value === undefined ? "" : `${fmt.number(value, 3)} ms`);

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
  { id: "staleness", title: "Staleness", value: (row) => row.staleness, num: true, hide: 560, cell: (row) => fmt.number(row.staleness, 3) },
];
