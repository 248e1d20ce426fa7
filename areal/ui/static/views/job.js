// `/job/NAME`: the curves of a job, what its steps waited for, and its alerts. A click or Enter opens the step.
import { html, useData, useEffect, useKeys, useMemo, useState, Link, Loading, Problem, State, flip, fmt, go, setQuery, objectPath, logsPath } from "../ui.js";
import { Actions } from "../actions.js";
import { Chart, CurveBar, SMOOTH, curveKeys, useCursor } from "../chart.js";
import { verbsOf } from "./object.js";

export const title = (route) => `job ${route.params.name}`;
export const up = () => "/";

// What a run is judged by, in this order; `m` shows the rest.
const MAIN = [
  ["reward", ["reward/mean", "eval/reward/mean"]], ["accuracy", ["accuracy", "eval/accuracy"]], ["loss", ["loss", "eval/loss", "critic/loss"]],
  ["KL", ["approx_kl", "ref_kl", "mismatch_kl"], "nats a token"], ["entropy", ["entropy"], "nats"], ["gradient norm", ["grad_norm", "critic/grad_norm"]],
  ["groups without spread", ["groups/without_spread"], "share"], ["answer length", ["length/mean", "length/max"], "tokens"], ["truncated", ["length/truncated"], "share"],
  ["staleness", ["staleness/mean", "staleness/max"], "versions"], ["throughput", ["tokens_per_second"], "tokens a second"], ["step time", ["time/step"], "s"],
];

export default function Job({ route }) {
  const { name } = route.params;
  const { q, smooth = "none", log, noclip, all, first, last } = route.query;
  const { data, error } = useData("job", { name, first, last, all: all || q ? 1 : null });
  const cursor = useCursor(route.query.at ? Number(route.query.at) : null);
  const open = (step) => go(`/job/${encodeURIComponent(name)}/step/${step}`);
  useKeys([
    ...curveKeys(route.query, cursor, data?.starts ?? []),
    { key: "Enter", help: "open the step", run: () => data?.hasSamples && open(cursor.at ?? data.lastStep) },
    { key: "c", help: "clip outliers or not", run: flip("noclip", noclip) },
    { key: "z", help: "only steps from the cursor on, or all", run: () => setQuery(first ? { first: null } : { first: cursor.at }) },
  ]);
  const charts = useMemo(() => chartsOf(data, all, q), [data, all, q]);
  const waits = useMemo(() => waitsOf(data), [data]);
  if (!data) return html`<${Loading} error=${error} />`;
  const look = { starts: data.starts, smooth: SMOOTH[smooth] ?? 0, log: Boolean(log), clip: !noclip, cursor, onOpen: data.hasSamples ? open : undefined };
  return html`
    <div class="head">
      <h1>${name}</h1> <${State} value=${data.phase} />
      <span class="facts">
        ${data.step !== null && data.step !== undefined && html`<span>step <b>${fmt.number(data.step)}</b>${data.totalSteps ? `/${fmt.number(data.totalSteps)}` : ""}</span>`}
        ${data.reward !== null && data.reward !== undefined && html`<span>reward <b>${fmt.number(data.reward)}</b></span>`}
        ${data.etaSeconds !== null && html`<span><b>${fmt.age(data.etaSeconds)}</b> left</span>`}
        ${data.attempt > 1 && html`<span>attempt <b>${data.attempt}</b></span>`}
        ${data.bottleneck && html`<span>last step: <b>${data.bottleneck}</b></span>`}
        <${Link} href=${logsPath(`TrainJob/${name}`)}>logs<//> <${Link} href=${`/object/trainjob/${encodeURIComponent(name)}`}>object<//> <${Link} href=${`/compare?jobs=${encodeURIComponent(name)}`}>compare<//>
        ${data.hasSamples && html`<${Link} href=${`/job/${encodeURIComponent(name)}/step/${data.lastStep}`}>samples of the last step<//>`}
        ${data.validatedStep !== null && html`<${Link} href=${`/job/${encodeURIComponent(name)}/step/${data.validatedStep}?eval=1`}>validation after step ${fmt.number(data.validatedStep)}<//>`}
        ${data.evaluations > 0 && html`<${Link} href=${`/evaluations?q=${encodeURIComponent(`trainjob/${name}`)}`}>${data.evaluations} evaluation${data.evaluations === 1 ? "" : "s"}<//>`}
      </span>
      <span class="grow"></span> <${Actions} target=${{ kind: "trainjob", name }} verbs=${verbsOf("TrainJob", data)} />
    </div>
    ${error && html`<${Problem} error=${error} />`}
    ${data.message && data.phase !== "Succeeded" && html`<div class="problem"><pre>${data.message}</pre></div>`}
    ${data.alerts.map((alert) => html`<div class="problem" key=${alert.rule}><pre>${alert.message}</pre><p class="hint">${alert.cause}. <code>${alert.next}</code></p></div>`)}
    ${data.steps > 0 && html`<${CurveBar} query=${route.query} filters="metrics">
      <button type="button" aria-pressed=${String(!noclip)} onClick=${flip("noclip", noclip)}>clip outliers</button>
      <${Readout} cursor=${cursor} data=${data} open=${open} />
    <//>`}
    ${data.shareRead < 1 && html`<p class="dim" role="status">${Math.round(100 * data.shareRead)}% of ${data.name}'s steps are read; until then the curves are of a sample of them</p>`}
    ${!data.steps && html`<p class="empty">It has written no step. <${Link} href=${logsPath(`TrainJob/${name}`)}>Its logs<//> have what it does.</p>`}
    ${data.steps > 0 && html`<div class="charts">
      ${charts.map((chart) => html`<${Chart} key=${chart.title} ...${look} ...${chart} />`)}
    </div>`}
    ${waits && !q && html`<${Chart} key="waits" ...${look} title="what its steps waited for" unit="share of a step" series=${waits} stacked height=${140} smooth=${0} />`}`;
}

// The step under the cursor, announced where arrows move it.
function Readout({ cursor, data, open }) {
  const [at, set] = useState(cursor.at);
  useEffect(() => {
    cursor.listeners.add(set);
    return () => cursor.listeners.delete(set);
  }, [cursor]);
  const step = at ?? data.lastStep;
  const to = data.bucket > 1 && at !== null ? ` to ${fmt.number(step + data.bucket - 1)}` : "";
  return html`<span class="readout" role="status">${step === null || step === undefined ? "" : html`step ${fmt.number(step)}${to}${data.hasSamples ? html` <button type="button" onClick=${() => open(step)}>open (Enter)</button>` : ""}`}</span>`;
}

function chartsOf(data, all, filter) {
  if (!data) return [];
  const chosen = (metrics) => metrics.filter((metric) => data.series[metric]);
  const made = (title, metrics, unit) => ({ title, unit, series: metrics.map((name) => ({ name, label: metrics.length > 1 ? name : undefined, points: data.series[name], notFinite: data.notFinite[name] })) });
  let found = MAIN.map(([title, metrics, unit]) => made(title, chosen(metrics), unit)).filter((each) => each.series.length);
  if (all || filter || !found.length) found = data.groups.map(({ title, metrics }) => made(title, chosen(metrics)));
  const words = (filter ?? "").toLowerCase();
  return words ? found.map((each) => ({ ...each, series: each.title.toLowerCase().includes(words) ? each.series : each.series.filter((one) => one.name.toLowerCase().includes(words)) })).filter((each) => each.series.length) : found;
}

// Shares of a step's time; what is in no phase is "other".
function waitsOf(data) {
  const whole = data?.series["time/step"]?.mean;
  if (!whole || !data.waits.length) return null;
  const share = (metric) => data.series[metric].mean.map((value, at) => (whole[at] ? Math.max(0, value ?? 0) / whole[at] : 0));
  const parts = data.waits.map(({ metric, title }, at) => ({ name: title, label: title, colour: at, points: { mean: share(metric) } }));
  const rest = whole.map((_, at) => Math.max(0, 1 - parts.reduce((sum, each) => sum + each.points.mean[at], 0)));
  return [...parts, { name: "other", label: "other", colour: 7, points: { mean: rest } }];
}
