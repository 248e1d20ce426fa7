// `/top`: what each process uses now, and since this view was opened, up to 15 minutes.
import { html, useData, Table, Filter, Link, Loading, Problem, State, fmt, go, logsPath, objectPath } from "../ui.js";
import { Spark } from "../spark.js";

export const title = () => "top";

export default function Top({ route }) {
  const { data, error } = useData("top", {});
  if (!data) return html`<h1>Top</h1><${Loading} error=${error} />`;
  const sum = (name) => data.processes.reduce((total, row) => total + (row[name] ?? 0), 0);
  return html`
    <div class="head"><h1>Top</h1><span class="facts">
      <span><b>${data.processes.length}</b> ${data.processes.length === 1 ? "process" : "processes"}</span><span><b>${fmt.number(sum("cpuPercent"))}%</b> CPU</span>
      <span><b>${fmt.bytes(sum("memoryBytes"))}</b> memory</span><span><b>${fmt.number(sum("tokensPerSecond"))}</b> tokens/s</span></span></div>
    ${error && html`<${Problem} error=${error} />`}
    <div class="bar"><${Filter} value=${route.query.q} label="Filter processes" placeholder="filter processes" /><span class="dim">lines begin when this view is opened, 15 minutes are kept</span></div>
    <${Table} focus label="Processes" columns=${COLUMNS} rows=${data.processes} rowKey=${(row) => row.uid} filterText=${route.query.q}
      onOpen=${(row) => { const [component, replica] = row.process.split("/"); go(`${logsPath(row.owner)}?component=${component}&replica=${replica}`); }} empty="no process runs" />`;
}

const unknown = (row) => (row.node ? html`<span class="dim">Unknown</span>` : "");
const line = (row, name, least) => html`<${Spark} at=${row.history.at} values=${row.history[name]} least=${least} />`;
const gpu = (each) => `${each.index ?? each.uuid}${each.usedBytes ? `: ${fmt.bytes(each.usedBytes)}` : ""}`;

const COLUMNS = [
  { id: "owner", title: "Owner", value: (row) => row.owner, cls: "nowrap", cell: (row) => html`<${Link} tabindex="-1" href=${objectPath(row.owner)}>${row.owner.split("/")[1]}<//>` },
  { id: "process", title: "Process", value: (row) => row.process, cls: "nowrap" },
  { id: "state", title: "State", value: (row) => row.state, hide: 560, cell: (row) => html`<${State} value=${row.state} />` },
  { id: "cpu", title: "CPU", value: (row) => row.cpuPercent, num: true, cls: "nowrap", cell: (row) => row.cpuPercent === null ? unknown(row) : `${Math.round(row.cpuPercent)}%` },
  { id: "cpuLine", title: "CPU, 15 min", value: () => "x", sort: false, hide: 820, search: () => "", cell: (row) => line(row, "cpuPercent", 100) },
  { id: "memory", title: "Memory", value: (row) => row.memoryBytes, num: true, cls: "nowrap", cell: (row) => row.memoryBytes === null ? unknown(row) : fmt.bytes(row.memoryBytes) },
  { id: "memoryLine", title: "Memory, 15 min", value: () => "x", sort: false, hide: 820, search: () => "", cell: (row) => line(row, "memoryBytes") },
  { id: "gpus", title: "GPU", value: (row) => row.gpus.map(gpu).join(", "), optional: true },
  { id: "tokens", title: "Tokens/s", value: (row) => row.tokensPerSecond, num: true, cell: (row) => fmt.number(row.tokensPerSecond) },
  { id: "tokensLine", title: "Tokens/s, 15 min", value: (row) => (row.history.tokensPerSecond ? "x" : null), optional: true, sort: false, hide: 820, search: () => "", cell: (row) => line(row, "tokensPerSecond") },
  { id: "waiting", title: "Queue", value: (row) => row.waiting, num: true, optional: true, hide: 560 },
  { id: "cache", title: "KV cache", value: (row) => row.cache, num: true, optional: true, hide: 560, cell: (row) => row.cache === null ? "" : `${Math.round(row.cache * 100)}%` },
  { id: "uptime", title: "Uptime", value: (row) => row.uptimeSeconds, num: true, hide: 560, cls: "nowrap", cell: (row) => fmt.age(row.uptimeSeconds) },
  { id: "node", title: "Node", value: (row) => row.node, optional: true, hide: 820 },
];
