// `/compare?jobs=a,b,c`: curves of jobs over each other, and where their configurations differ.
import { html, useData, useKeys, useMemo, Link, Loading, Problem, Table, setQuery } from "../ui.js";
import { Chart, CurveBar, SMOOTH, colourOf, curveKeys, useCursor } from "../chart.js";

export const title = (route) => `compare ${(route.query.jobs ?? "").replaceAll(",", ", ")}`;
export const up = () => "/";

const MAIN = /^(reward\/mean|eval\/reward\/mean|(eval\/)?accuracy|(eval\/)?loss|grad_norm|approx_kl|ref_kl|entropy|length\/mean|groups\/without_spread|staleness\/max|tokens_per_second|time\/step)$/;

export default function Compare({ route }) {
  const { jobs = "", smooth = "none", log, all, q } = route.query;
  const { data, error } = useData("compare", { jobs, all: all || q ? 1 : null });
  const names = jobs.split(",").filter(Boolean);
  const cursor = useCursor();
  const charts = useMemo(() => chartsOf(data, all, q), [data, all, q]);
  const starts = useMemo(() => charts.reduce((longest, each) => (each.starts.length > longest.length ? each.starts : longest), []), [charts]);
  const pick = (name) => setQuery({ jobs: (names.includes(name) ? names.filter((each) => each !== name) : [...names, name]).join(",") });
  useKeys(curveKeys(route.query, cursor, starts));
  if (!data) return html`<${Loading} error=${error} />`;
  // The data may still be of the jobs that were chosen before: a table of the jobs of the address would be wrong.
  const compared = data.jobs.map((job) => job.name).filter((name) => !(name in data.unreadable));
  const columns = [
    { id: "field", title: "Field", value: (row) => row.field, cell: (row) => html`<span class="mono">${row.field}</span>` },
    ...compared.map((name) => ({ id: `job-${name}`, title: name, value: (row) => text(row.values[name]), cell: (row) => html`<span class="mono">${name in row.values ? text(row.values[name]) : html`<span class="dim">not set</span>`}</span>` })),
  ];
  return html`
    <div class="head"><h1>Compare</h1></div>
    ${error && html`<${Problem} error=${error} />`}
    <div class="bar" role="group" aria-label="Jobs">${data.known.map((name) => html`<button type="button" key=${name} aria-pressed=${String(names.includes(name))} onClick=${() => pick(name)}>${names.includes(name) && html`<i class="dot" style=${{ background: colourOf(names.indexOf(name)) }}></i>`}${name}</button>`)}</div>
    <${CurveBar} query=${route.query} filters="metrics and fields">${names.map((name) => html`<${Link} key=${name} href=${`/job/${encodeURIComponent(name)}`}>${name}<//>`)}<//>
    ${data.jobs.filter((job) => job.shareRead < 1).map((job) => html`<p class="dim" key=${job.name} role="status">${Math.round(100 * job.shareRead)}% of ${job.name}'s steps are read; until then its curves are of a sample of them</p>`)}
    ${!names.length && html`<p class="empty">choose jobs above</p>`}
    <div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.title} ...${chart} smooth=${SMOOTH[smooth] ?? 0} log=${Boolean(log)} cursor=${cursor} />`)}</div>
    ${Object.entries(data.unreadable).map(([name, why]) => html`<p class="dim" key=${name}>configuration of ${name}: ${why}</p>`)}
    ${compared.length > 1 && html`<div class="compare"><${Table} label="Configuration" caption="Configuration where it differs" columns=${columns} rows=${data.config} rowKey=${(row) => row.field} filterText=${q} empty="the configurations are the same" /></div>`}`;
}

const text = (value) => (value === null || value === undefined ? "null" : typeof value === "string" ? value : JSON.stringify(value));

// One chart a metric, one curve a job. Jobs are reduced to buckets of their own size: their steps are joined on one axis.
function chartsOf(data, all, filter) {
  if (!data?.jobs.length) return [];
  const metrics = data.groups.flatMap((group) => group.metrics);
  const words = (filter ?? "").toLowerCase();
  let chosen = metrics.filter((metric) => all || words || MAIN.test(metric));
  if (!chosen.length) chosen = metrics;
  if (words) chosen = chosen.filter((metric) => metric.toLowerCase().includes(words));
  return chosen.slice(0, 60).map((metric) => {
    const having = data.jobs.map((job, at) => ({ job, at })).filter(({ job }) => job.series[metric]);
    const starts = [...new Set(having.flatMap(({ job }) => job.starts))].sort((a, b) => a - b);
    const series = having.map(({ job, at }) => {
      const place = new Map(job.starts.map((step, index) => [step, index]));
      const spread = (values) => values && starts.map((step) => (place.has(step) ? values[place.get(step)] : null));
      const { mean, low, high } = job.series[metric];
      return { name: job.name, label: job.name, colour: at, points: { mean: spread(mean), low: spread(low), high: spread(high) } };
    });
    return { title: metric, starts, series };
  });
}
