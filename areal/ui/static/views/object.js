// `/object/KIND/NAME`: all that `areal describe` knows of one object.
import { Actions } from "../actions.js";
import { html, useData, useKeys, Table, Link, Loading, Problem, State, fmt, go, objectPath, logsPath, sessionsPath } from "../ui.js";

export const title = (route) => `${route.params.kind} ${route.params.name}`;

export default function ObjectView({ route }) {
  const { kind, name } = route.params;
  const { data, error } = useData("object", { kind, name });
  const logs = `/logs/${kind}/${name}`;
  useKeys([{ key: "l", help: "logs", run: () => go(logs) }]);
  if (!data) return html`<${Loading} error=${error} />`;
  const { status, metadata } = data;
  const weights = status.weights ?? {};
  const facts = [
    ["Cause", status.message && html`<span class=${status.phase === "Ready" ? "" : "bad"}>${status.message}</span>`],
    ["Address", status.address && html`<span class="mono">${status.address}</span>`],
    ["Weights", (weights.version != null || weights.path) && html`${weights.version != null && `version ${weights.version}`}${weights.writer && html` of <${Link} href=${objectPath(weights.writer)}>${weights.writer}<//>`} <span class="mono">${weights.path ?? ""}</span>`],
    ["Generation", `${metadata.generation} (revision ${metadata.revision})`],
    ["Created", metadata.createdAt],
    ["Owner", metadata.owner && html`<${Link} href=${objectPath(metadata.owner)}>${metadata.owner}<//>`],
    ["Set", metadata.set],
    ["Depends on", metadata.dependsOn.join(", ")],
    ["Labels", Object.entries(metadata.labels).map(([key, value]) => `${key}=${value}`).join(", ")],
  ].filter(([, value]) => value);
  const broken = data.processes.filter((row) => row.lastExit && (row.firstException || row.lastLines?.length));
  return html`
    <div class="head"><h1><span class="dim">${data.kind}</span> ${metadata.name}</h1> <${State} value=${status.phase} /> <span class="dim">${status.ready} ready</span>
      <span class="grow"></span> <${Actions} target=${{ kind, name }} verbs=${verbsOf(data.kind, status)} />
      ${SERVES.has(data.kind) && html`<${Link} href=${sessionsPath(kind, name)}>sessions<//>`} <${Link} href=${logs}>logs<//></div>
    ${error && html`<${Problem} error=${error} />`}
    <div class="panel"><dl class="facts">${facts.map(([term, value]) => html`<dt key=${term}>${term}</dt><dd>${value}</dd>`)}</dl></div>
    ${data.related.length > 0 && html`<${Table} label="Objects" caption="Objects of it" name="related" sortName="relatedsort" columns=${RELATED} rows=${data.related} rowKey=${(row) => row.ref} onOpen=${(row) => go(objectPath(row.ref))} />`}
    <${Table} focus label="Processes" caption="Processes" columns=${PROCESSES} rows=${data.processes} rowKey=${(row) => row.uid} note=${reason}
      onOpen=${(row) => go(`/logs/${row.owner.toLowerCase()}?component=${row.component}&replica=${row.replica}`)} empty="no process runs" />
    ${broken.map((row) => html`<div class="panel" key=${row.uid}><h2>Last exit of ${row.owner} ${row.component}/${row.replica}: ${row.lastExit.reason}, ${row.lastExit.at}</h2>
      <div class="pad">${row.firstException && html`<pre class="bad">${row.firstException}</pre>`}<pre class="dim">${(row.lastLines ?? []).join("\n")}</pre></div></div>`)}
    <${Table} label="Conditions" caption="Conditions" name="condition" sortName="conditionsort" columns=${CONDITIONS} rows=${status.conditions ?? []} rowKey=${(row) => row.type} />
    <${Table} label="Events" caption="Last events" name="event" sortName="eventsort" columns=${EVENTS} rows=${[...data.events].reverse()} rowKey=${(row) => `${row.at} ${row.reason}`} empty="nothing happened yet" />
    <${Table} label="Spec" caption="Spec, as it was set" name="field" sortName="fieldsort" columns=${SPEC} rows=${data.origins} rowKey=${(row) => row.path} empty="no field is set" />`;
}

const SERVES = new Set(["InferenceService", "AgentService"]);
// Suspended, a job that was stopped, and what waits for a job: each has no process, and resumes.
const RESTS = new Set(["Suspended", "Stopped", "Pending"]);
const ENDED = new Set(["Succeeded", "Failed"]);
export const verbsOf = (kind, status) => [...(RESTS.has(status.phase) ? ["resume"] : kind === "TrainJob" && ENDED.has(status.phase) ? ["restart"] : ["restart", "suspend"]), ...(/^(Model|AgentService)$/.test(kind) ? ["scale"] : [])];

const reason = (row) => row.reason && row.state !== "running" ? html`<span class=${row.state === "queued" ? "warn" : "bad"}>${row.reason}</span>` : null;

const RELATED = [
  { id: "ref", title: "Object", value: (row) => row.ref, cell: (row) => html`<${Link} tabindex="-1" href=${objectPath(row.ref)}>${row.ref}<//>` },
  { id: "ready", title: "Ready", value: (row) => row.ready, num: true },
  { id: "phase", title: "Status", value: (row) => row.phase, cell: (row) => html`<${State} value=${row.phase} />` },
  { id: "message", title: "Cause", value: (row) => row.message },
];
const PROCESSES = [
  { id: "owner", title: "Owner", value: (row) => row.owner, hide: 820 },
  { id: "process", title: "Process", value: (row) => `${row.component}/${row.replica}`, cls: "nowrap", cell: (row) => html`<${Link} tabindex="-1" href=${`${logsPath(row.owner)}?component=${row.component}&replica=${row.replica}`}>${row.component}/${row.replica}<//>` },
  { id: "state", title: "State", value: (row) => row.state, cell: (row) => html`<${State} value=${row.state} />` },
  { id: "pid", title: "PID", value: (row) => row.pid, num: true, hide: 560 },
  { id: "gpus", title: "GPU", optional: true, value: (row) => row.gpus.join(", "), hide: 820 },
  { id: "ports", title: "Port", value: (row) => row.ports.join(", "), num: true, hide: 560 },
  { id: "restarts", title: "Restarts", value: (row) => row.restarts, num: true },
  { id: "uptime", title: "Uptime", value: (row) => row.uptimeSeconds, num: true, cls: "nowrap", cell: (row) => fmt.age(row.uptimeSeconds) },
  { id: "node", title: "Node", optional: true, value: (row) => row.node, hide: 820 },
];
const CONDITIONS = [
  { id: "type", title: "Type", value: (row) => row.type },
  { id: "status", title: "Status", value: (row) => row.status },
  { id: "reason", title: "Reason", value: (row) => row.reason },
  { id: "since", title: "Since", value: (row) => row.lastTransitionTime, cls: "nowrap", hide: 560 },
  { id: "message", title: "Message", value: (row) => row.message },
];
const EVENTS = [
  { id: "at", title: "When", value: (row) => row.at, cls: "nowrap", cell: (row) => fmt.clock(row.at) },
  { id: "type", title: "Type", value: (row) => row.type, hide: 560, cell: (row) => html`<${State} value=${row.type} />` },
  { id: "reason", title: "Reason", value: (row) => row.reason },
  { id: "message", title: "Message", value: (row) => row.message, cell: (row) => html`${row.message}${row.count > 1 ? html` <span class="dim">×${row.count}</span>` : ""}` },
];
const SPEC = [
  { id: "path", title: "Field", value: (row) => row.path, cls: "mono" },
  { id: "value", title: "Value", value: (row) => JSON.stringify(row.value), cls: "mono" },
  { id: "origin", title: "Origin", value: (row) => row.origin },
  { id: "source", title: "Source", value: (row) => row.source, hide: 820 },
  { id: "actor", title: "Who", value: (row) => row.actor, hide: 820 },
];
