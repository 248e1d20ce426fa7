// `/`: every object with its readiness, the cause of what is not ready, and the last events.
import { html, useAbout, useData, useKeys, useMemo, Table, Filter, Link, Loading, Problem, State, Toggle, flip, fmt, go, objectPath, logsPath } from "../ui.js";

export const title = () => "objects";
export const up = () => "/";

const WELL = new Set(["Ready", "Running", "Succeeded"]);
const SHORT = { InferenceService: "service", Model: "model", AgentService: "agents", TrainJob: "job" };

export default function Home({ route }) {
  const { data, error } = useData("home", {});
  const about = useAbout();
  const all = route.query.all === "1";
  useKeys([
    { key: "a", help: "also jobs that have ended", run: flip("all", all) },
    { key: "l", help: "logs of the selected object", run: () => { const row = selected(data); if (row) go(logsPath(row.ref)); } },
  ]);
  const rows = useMemo(() => arranged(data, all), [data, all]);
  const events = useMemo(() => [...(data?.events ?? [])].reverse(), [data]);
  if (!data) return html`<${Loading} error=${error} />`;
  const current = data.objects.filter((row) => !isPast(row));
  const failing = current.filter((row) => ![...WELL, "Suspended", "Stopped"].includes(row.status.phase));
  const ended = data.objects.length - current.length;
  return html`
    <div class="head">
      <h1>Objects</h1>
      <span class="facts">
        <span><b>${current.length}</b> ${current.length === 1 ? "object" : "objects"}</span>
        <span><b class=${failing.length ? "bad" : ""}>${failing.length}</b> not ready</span>
        <span class="mono">${data.home}</span>
      </span>
    </div>
    ${error && html`<${Problem} error=${error} />`}
    <div class="bar">
      <${Filter} value=${route.query.q} label="Filter objects" placeholder="filter objects" />
      ${ended > 0 && html`<${Toggle} name="all" on=${all}>ended too (${ended})<//>`}
    </div>
    <${Table} label="Objects" focus columns=${COLUMNS} rows=${rows} rowKey=${(row) => row.ref} filterText=${route.query.q} note=${note}
      onOpen=${(row) => go(objectPath(row.ref))} empty="no object is recorded in this home: areal apply -f FILE, or areal init KIND" />
    ${data.unreadable.map((each) => html`<div class="problem" key=${each.path}><pre class="mono">${each.path}</pre><p class="hint">${each.reason}</p></div>`)}
    ${data.driftUnknown && html`<p class="dim">Drift is not known: ${data.driftUnknown}</p>`}
    <${Table} label="Last events" caption="Last events" columns=${EVENTS} rows=${events} name="event" sortName="eventsort" rowKey=${(row) => `${row.at} ${row.ref} ${row.reason}`}
      filterText=${route.query.q} onOpen=${(row) => go(objectPath(row.ref))} empty=${about?.gateway ? "events are on the machine of the gateway" : "nothing happened yet"} />`;
}

// Whether a job has ended and nothing has happened to it for a day.
function isPast(row) {
  return row.ended && Date.now() / 1000 - (row.lastEvent?.at ?? row.createdAt ?? 0) > 86400;
}

function selected(data) {
  const ref = document.querySelector('main tr[aria-current="true"]')?.querySelector("a")?.dataset.ref;
  return data?.objects.find((row) => row.ref === ref);
}

// A service, then its models; agents; jobs. A model without its service stands by itself.
function arranged(data, all) {
  if (!data) return [];
  const shown = data.objects.filter((row) => all || !isPast(row));
  const services = shown.filter((row) => !row.host);
  const names = new Set(services.map((row) => row.name));
  const hosted = (service) => shown.filter((row) => row.host === service.name && service.kind === "InferenceService").map((row) => ({ ...row, below: true }));
  return [...services.flatMap((row) => [row, ...hosted(row)]), ...shown.filter((row) => row.host && !names.has(row.host))];
}

const weights = (row) => row.status.weights ?? {};
const job = (row) => row.job ?? {};

const COLUMNS = [
  { id: "name", title: "Object", value: (row) => row.ref, cls: "nowrap",
    cell: (row) => html`<span style=${{ paddingLeft: row.below ? "14px" : 0 }}><${Link} href=${objectPath(row.ref)} tabindex="-1" data-ref=${row.ref}>${row.name}<//> <span class="dim">${SHORT[row.kind] ?? row.kind}</span></span>` },
  { id: "status", title: "Status", value: (row) => row.status.phase, cell: (row) => html`<${State} value=${row.status.phase} />` },
  { id: "ready", title: "Ready", value: (row) => row.status.ready, num: true, sort: false, hide: 560 },
  { id: "progress", title: "Progress", optional: true, value: (row) => job(row).step, cls: "nowrap", search: (row) => "",
    cell: (row) => job(row).step === undefined ? "" : html`step ${fmt.number(job(row).step)}${job(row).total ? html`<span class="dim">/${fmt.number(job(row).total)}</span>` : ""}${WELL.has(row.status.phase) && row.status.phase === "Running" && job(row).etaSeconds ? html`<span class="dim hide-560">, ${fmt.age(job(row).etaSeconds)} left</span>` : ""}` },
  { id: "reward", title: "Reward", optional: true, value: (row) => job(row).reward, num: true, cell: (row) => fmt.number(job(row).reward) },
  { id: "weights", title: "Weights", optional: true, value: (row) => weights(row).version ?? weights(row).path, search: (row) => `${weights(row).writer ?? ""} ${weights(row).path ?? ""}`, hide: 820, cls: "links",
    cell: (row) => weights(row).version == null && !weights(row).path ? "" : html`${weights(row).version != null ? `v${weights(row).version}` : ""}${weights(row).writer ? html` <span class="dim">of</span> <${Link} href=${objectPath(weights(row).writer)} tabindex="-1">${weights(row).writer.split("/")[1]}<//>` : ""} <span class="dim mono">${base(weights(row))}</span>${weights(row).others?.length ? html` <span class="warn">others ${weights(row).others.map((v) => `v${v}`).join(", ")}</span>` : ""}` },
  { id: "address", title: "Address", optional: true, value: (row) => row.status.address, hide: 820, cell: (row) => html`<span class="mono">${row.status.address ?? ""}</span>` },
  { id: "restarts", title: "Restarts", optional: true, value: (row) => row.processes.restarts, num: true, hide: 820, cell: (row) => row.processes.restarts ? html`<span class="warn">${row.processes.restarts}</span>` : html`<span class="dim">0</span>` },
  { id: "age", title: "Age", optional: true, value: (row) => row.createdAt ? Date.now() / 1000 - row.createdAt : null, num: true, hide: 560, cls: "nowrap", search: () => "", cell: (row) => row.createdAt ? fmt.age(Date.now() / 1000 - row.createdAt) : "" },
];

// The last part of a path of weights, unless it is their version.
const base = ({ path, version }) => { const last = path?.replace(/\/+$/, "").split("/").pop() ?? ""; return last === `v${version}` ? "" : last; };

// The cause of what is not ready, and what left the record.
function note(row) {
  const words = row.status.message;
  const drift = row.drift.map((each) => html`<div key=${each.target + each.kind}><span class="warn">drift</span> ${each.target}: ${each.kind}: ${each.message}</div>`);
  const quiet = WELL.has(row.status.phase) || !words;
  if (quiet && !drift.length) return null;
  return html`<div style=${{ paddingLeft: row.below ? "14px" : 0 }}>
    ${!quiet && html`<div><span class="bad">${row.reason || row.status.phase}</span> ${words}</div>`}
    ${drift}
  </div>`;
}

const EVENTS = [
  { id: "at", title: "When", value: (row) => row.at, num: false, cls: "nowrap", search: () => "", cell: (row) => html`<span class="dim">${fmt.clock(row.at)}</span>` },
  { id: "type", title: "Type", value: (row) => row.type, hide: 560, cell: (row) => html`<${State} value=${row.type} />` },
  { id: "ref", title: "Object", value: (row) => row.ref, cls: "nowrap", cell: (row) => html`<${Link} href=${objectPath(row.ref)} tabindex="-1">${row.ref.split("/")[1]}<//>` },
  { id: "reason", title: "Reason", value: (row) => row.reason },
  { id: "message", title: "Message", value: (row) => row.message, cell: (row) => html`${row.message}${row.count > 1 ? html` <span class="dim">×${row.count}</span>` : ""}` },
];
