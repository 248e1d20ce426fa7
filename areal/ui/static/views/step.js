// `/job/NAME/step/S[/group/G[/sample/K]]`: a step's samples by group, a group's samples side by side, one sample.
import { html, useData, useEffect, useKeys, useLayoutEffect, useMemo, useRef, Filter, Link, Loading, Problem, Table, Toggle, flip, fmt, go, setQuery } from "../ui.js";
import { COLOURS, histogramOf, legendOf, plural, showEpisode, versionsOf } from "../tokens.js";

export const title = ({ params }) => [`${params.name} step ${params.step}`, params.group && `group ${params.group}`, params.sample && `sample ${params.sample}`].filter(Boolean).join(", ");
export const up = ({ params, query }) => {
  const base = `/job/${encodeURIComponent(params.name)}`;
  const step = `${base}/step/${params.step}`;
  const suffix = query.eval ? "?eval=1" : "";
  if (params.sample !== undefined) return `${step}/group/${encodeURIComponent(params.group)}${suffix}`;
  if (params.group !== undefined) return `${step}${suffix}`;
  return `${base}?at=${params.step}`;
};

const pathOf = (params, { step = params.step, group, sample, isEval }) => `/job/${encodeURIComponent(params.name)}/step/${step}${group === undefined ? "" : `/group/${encodeURIComponent(group)}`}${sample === undefined ? "" : `/sample/${sample}`}${isEval ? "?eval=1" : ""}`;

export default function Step({ route }) {
  return route.params.group === undefined ? html`<${Groups} route=${route} />` : html`<${Group} route=${route} />`;
}

// Previous and next step that has samples; the evaluation after a step is a place of its own.
function useSteps(data, params, isEval) {
  const to = (place) => place && go(pathOf(params, place));
  useKeys([
    { key: "ArrowRight", help: "next step", run: () => to(data?.next) },
    { key: "ArrowLeft", help: "previous step", run: () => to(data?.previous) },
  ]);
}

function Head({ data, params, isEval, children }) {
  const link = (place, words) => (place ? html`<${Link} href=${pathOf(params, place)}>${words}<//>` : html`<span class="dim">${words}</span>`);
  return html`
    <div class="head">
      <h1><${Link} href=${`/job/${encodeURIComponent(params.name)}?at=${params.step}`}>${params.name}<//> ${isEval ? "evaluation after" : ""} step ${fmt.number(data.step)}</h1>
      <span class="facts">${link(data.previous, "← previous")} ${link(data.next, "next →")} <span>of ${plural(data.count, "recorded step")}${data.evaluations ? ` and ${plural(data.evaluations, "evaluation")}` : ""}, ${fmt.number(data.firstStep)} to ${fmt.number(data.lastStep)}</span> ${children}</span>
    </div>
    ${!data.decoded && html`<p class="dim">Token ids are shown: the tokenizer of the job's configuration is not on this machine.</p>`}
    ${data.damagedLines > 0 && html`<div class="problem"><pre>${plural(data.damagedLines, "line")} of ${data.path} cannot be read; the others are shown</pre><p class="hint">${data.damaged[0]}</p></div>`}`;
}

function Groups({ route }) {
  const { params, query } = route;
  const isEval = query.eval === "1";
  const { data, error } = useData("step", { name: params.name, step: params.step, eval: isEval ? 1 : null });
  const flat = query.view === "samples";
  const [from, to] = [query.from, query.to].map((each) => (each === undefined ? null : Number(each)));
  const spread = query.spread === "1";
  useSteps(data, params, isEval);
  useKeys([
    { key: "v", help: "groups, or samples", run: () => setQuery({ view: flat ? null : "samples" }) },
    { key: "z", help: "only groups with spread", run: flip("spread", spread) },
    { key: "x", help: "no filter of rewards", run: () => setQuery({ from: null, to: null }) },
  ]);
  const groups = useMemo(() => chosen(data?.groups ?? [], from, to, spread), [data, from, to, spread]);
  const samples = useMemo(() => groups.flatMap((group) => group.samples.map((sample) => ({ ...sample, group: group.group }))), [groups]);
  if (!data) return html`<${Loading} error=${error} />`;
  const all = data.groups.flatMap((group) => group.samples);
  const without = data.groups.filter((group) => group.withoutSpread).length;
  return html`
    <${Head} data=${data} params=${params} isEval=${isEval}>
      <span><b>${plural(data.groups.length, "group")}</b></span> <span><b>${plural(all.length, "sample")}</b></span>
      ${without > 0 && html`<span><b class="warn">${without}</b> without spread</span>`}
    <//>
    ${error && html`<${Problem} error=${error} />`}
    <div class="step-top">
      <div class="panel pad"><${Histogram} rewards=${all.map((each) => each.reward)} from=${from} to=${to} /></div>
      <${Waits} data=${data} isEval=${isEval} />
    </div>
    <div class="bar">
      <${Filter} value=${query.q} label="Filter by text" placeholder="filter by text" />
      <button type="button" aria-pressed=${String(!flat)} onClick=${() => setQuery({ view: null })}>groups</button>
      <button type="button" aria-pressed=${String(flat)} onClick=${() => setQuery({ view: "samples" })}>samples</button>
      <${Toggle} name="spread" on=${spread}>with spread only<//>
      ${from !== null && html`<button type="button" onClick=${() => setQuery({ from: null, to: null })}>reward ${fmt.number(from)} to ${fmt.number(to)} ×</button>`}
    </div>
    ${flat
      ? html`<${Table} key="samples" focus label="Samples" columns=${SAMPLES} rows=${samples} rowKey=${(row) => row.episode} filterText=${query.q} href=${(row) => pathOf(params, { group: row.group, sample: row.sample, isEval })} empty="no sample has such a reward" />`
      : html`<${Table} key="groups" focus label="Groups" columns=${GROUPS} rows=${groups} rowKey=${(row) => row.group} filterText=${query.q} href=${(row) => pathOf(params, { group: row.group, isEval })} empty="no group has such a reward" />`}
    <${Failures} data=${data} />`;
}

function chosen(groups, from, to, spread) {
  return groups
    .filter((group) => !spread || !group.withoutSpread)
    .map((group) => (from === null ? group : { ...group, samples: group.samples.filter((each) => each.reward !== null && each.reward >= from - 1e-9 && each.reward <= to + 1e-9) }))
    .filter((group) => group.samples.length);
}

function Histogram({ rewards, from, to }) {
  const host = useRef(null);
  const onPick = (begin, end) => setQuery(begin === null ? { from: null, to: null } : { from: begin, to: end });
  useLayoutEffect(() => {
    const focused = [...(host.current.querySelectorAll("button") ?? [])].indexOf(document.activeElement);
    host.current.replaceChildren(histogramOf(rewards, { from, to, onPick }));
    if (focused >= 0) host.current.querySelectorAll("button")[focused]?.focus();
  }, [rewards.join(), from, to]);
  return html`<div ref=${host}></div>`;
}

// The numbers of a training step, or the scores of the evaluation after it.
function Waits({ data, isEval }) {
  const whole = isEval ? undefined : data.metrics["time/step"];
  const names = isEval ? Object.keys(data.metrics).filter((name) => name.startsWith("eval/")).sort() : ["reward/mean", "approx_kl", "entropy", "grad_norm", "staleness/max", "length/mean", "tokens_per_second"];
  const known = names.filter((name) => typeof data.metrics[name] === "number");
  if (!known.length && whole === undefined) return html`<p class="panel pad dim">metrics.jsonl has no numbers of this step</p>`;
  return html`<dl class="facts panel">
    ${known.map((name) => html`<dt key=${name}>${name}</dt><dd>${fmt.number(data.metrics[name])}</dd>`)}
    ${whole !== undefined && html`<dt>time</dt><dd>${fmt.duration(whole)}: ${data.waits.filter((each) => each.seconds > 0.005 * whole).sort((a, b) => b.seconds - a.seconds).map((each) => `${each.title} ${Math.round((100 * each.seconds) / whole)}%`).join(", ")}</dd>`}
  </dl>`;
}

function Failures({ data }) {
  if (!data.failures.length) return data.failuresCut ? html`<p class="dim">Failed rollouts of so early a step are no longer at the end of failures.jsonl, which is all that is read.</p>` : null;
  const left = data.failuresLeftOut ? `; ${data.failuresLeftOut} more in failures.jsonl` : "";
  return html`<${Table} label="Failed rollouts" caption=${`Failed rollouts before this step${left}`} columns=${FAILURES} rows=${data.failures} name="failure" sortName="failuresort" rowKey=${(row) => `${row.episode} ${row.at}`} />`;
}

const FAILURES = [
  { id: "at", title: "When", value: (row) => row.at, cls: "nowrap", cell: (row) => fmt.clock(row.at) },
  { id: "episode", title: "Episode", value: (row) => row.episode, cls: "mono" },
  { id: "blame", title: "Fault of", value: (row) => row.blame },
  { id: "error", title: "Cause", value: (row) => row.error },
];

const reward = (value) => (value === null ? html`<span class="dim">none</span>` : fmt.number(value));
const GROUPS = [
  { id: "group", title: "Group", value: (row) => row.group, cls: "nowrap mono", hide: 560 },
  { id: "question", title: "Prompt", value: (row) => row.samples[0].question, cls: "clip wide", cell: (row) => row.samples[0].question },
  { id: "answers", title: "Answer", value: (row) => row.samples.map((each) => each.hint).join("  "), cls: "clip wide mono", hide: 820, cell: (row) => [...new Set(row.samples.map((each) => each.hint))].join("   ") },
  { id: "rewards", title: "Rewards", value: (row) => row.mean, sort: false, search: () => "", cell: (row) => html`<${Dots} samples=${row.samples} />` },
  { id: "mean", title: "Mean", value: (row) => row.mean, num: true, cell: (row) => reward(row.mean) },
  { id: "spread", title: "Spread", value: (row) => row.spread, num: true, cell: (row) => (row.withoutSpread ? html`<span class="warn" title="equal rewards: no gradient">0 no gradient</span>` : fmt.number(row.spread)), cls: "nowrap" },
  { id: "n", title: "Samples", value: (row) => row.samples.length, num: true, hide: 560 },
  { id: "tokens", title: "Tokens", value: (row) => row.samples.reduce((sum, each) => sum + each.tokens, 0), num: true, hide: 560, cell: (row) => fmt.number(row.samples.reduce((sum, each) => sum + each.tokens, 0)) },
];

// One mark a sample, from its group's lowest to its highest reward; a filled one is above the mean.
export function Dots({ samples }) {
  const known = samples.map((each) => each.reward).filter((each) => each !== null);
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity), low = known.reduce((a, b) => Math.min(a, b), Infinity);
  return html`<span class="dots" role="img" aria-label=${`rewards ${known.map((each) => fmt.number(each)).join(", ")}`}>${samples.slice(0, 32).map((each) => html`<i class=${each.reward === null ? "none" : high > low && each.reward > (low + high) / 2 ? "above" : high === low && high > 0 ? "above" : ""}></i>`)}</span>`;
}

const SAMPLES = [
  { id: "episode", title: "Sample", value: (row) => row.episode, cls: "nowrap mono" },
  { id: "hint", title: "Answer", value: (row) => row.hint, cls: "clip wide mono", search: (row) => `${row.hint} ${row.question}` },
  { id: "reward", title: "Reward", value: (row) => row.reward, num: true, cell: (row) => reward(row.reward) },
  { id: "advantage", title: "Advantage", value: (row) => row.advantage, num: true, hide: 560, cell: (row) => fmt.number(row.advantage) },
  { id: "tokens", title: "Tokens", value: (row) => row.tokens, num: true },
  { id: "turns", title: "Turns", value: (row) => row.turns, num: true, hide: 820 },
  { id: "logprob", title: "Mean logprob", value: (row) => row.meanLogprob, num: true, hide: 820, cell: (row) => fmt.number(row.meanLogprob) },
  { id: "versions", title: "Version", value: (row) => row.versions[0], num: true, hide: 820, cell: (row) => row.versions.join(", ") },
  { id: "ended", title: "Ended", value: (row) => (row.truncated ? "truncated" : ""), hide: 820, cell: (row) => (row.truncated ? html`<span class="warn">truncated</span>` : "") },
];

function Group({ route }) {
  const { params, query } = route;
  const isEval = query.eval === "1";
  const single = params.sample !== undefined;
  const colour = colourOf(query);
  const { data, error } = useData("step", { name: params.name, step: params.step, group: params.group, sample: params.sample, eval: isEval ? 1 : null });
  const here = data?.group?.samples ?? [];
  const at = here.findIndex((each) => String(each.sample) === params.sample);
  const toGroup = (group) => group && go(pathOf(params, { group, isEval }) + (query.colour ? `${isEval ? "&" : "?"}colour=${query.colour}` : ""));
  const toSample = (sample) => sample && go(pathOf(params, { group: params.group, sample: sample.sample, isEval }) + (query.colour ? `${isEval ? "&" : "?"}colour=${query.colour}` : ""));
  useKeys([
    ...tokenKeys(query),
    { key: "]", help: "next group", run: () => toGroup(data?.nextGroup) },
    { key: "[", help: "previous group", run: () => toGroup(data?.previousGroup) },
    ...(single ? [
      { key: "j", help: "next sample", run: () => toSample(here[at + 1]) }, { key: "k", help: "previous sample", run: () => at > 0 && toSample(here[at - 1]) },
      { key: "ArrowDown", help: "next sample", run: () => toSample(here[at + 1]) }, { key: "ArrowUp", help: "previous sample", run: () => at > 0 && toSample(here[at - 1]) },
    ] : sampleKeys),
  ]);
  const versions = useMemo(() => versionsOf((data?.episodes ?? []).map((each) => each.shown)), [data]);
  if (!data) return html`<${Loading} error=${error} />`;
  const first = data.episodes[0];
  return html`
    <${Head} data=${data} params=${params} isEval=${isEval}>
      ${data.previousGroup ? html`<${Link} href=${pathOf(params, { group: data.previousGroup, isEval })}>[ group<//>` : ""} ${data.nextGroup ? html`<${Link} href=${pathOf(params, { group: data.nextGroup, isEval })}>group ]<//>` : ""}
    <//>
    ${error && html`<${Problem} error=${error} />`}
    <div class="head">
      <h2>group <span class="mono">${data.group.group}</span>${single ? html`, sample ${params.sample}` : ""}</h2>
      <span class="facts">
        <span>mean <b>${fmt.number(data.group.mean)}</b></span>
        <span>spread ${data.group.withoutSpread ? html`<b class="warn">0: no gradient</b>` : html`<b>${fmt.number(data.group.spread)}</b>`}</span>
        <span><b>${plural(here.length, "sample")}</b></span>
        ${single && html`<${Link} href=${pathOf(params, { group: params.group, isEval })}>all samples of the group<//>`}
      </span>
    </div>
    ${first && Object.keys(first.shown.example).length > 0 && html`<${Example} example=${first.shown.example} question=${first.question} />`}
    <${ColourBar} colour=${colour} versions=${versions} />
    <div class=${single ? "side one" : "side"}>
      ${data.episodes.map((each) => html`<${Sample} key=${each.episode} row=${each} colour=${colour} versions=${versions} open=${query.open ? true : single ? null : false}
        href=${single ? null : pathOf(params, { group: params.group, sample: each.sample, isEval })} />`)}
    </div>
    ${data.leftOut > 0 && html`<p class="dim">${plural(data.leftOut, "more sample")} of this group ${data.leftOut === 1 ? "is" : "are"} not shown side by side: open ${data.leftOut === 1 ? "it" : "them"} by number in the address, .../sample/K</p>`}`;
}

export function stepTo(by) {
  const all = [...document.querySelectorAll(".side article")];
  const now = all.findIndex((each) => each.contains(document.activeElement));
  const next = all[Math.max(0, Math.min(all.length - 1, now + by))];
  next?.querySelector("header a, header b[tabindex]")?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

export function Example({ example, question }) {
  return html`<details class="panel example"><summary>${question ? html`<span class="mono">${question.slice(0, 160)}</span>` : "example"} <span class="dim">(${Object.keys(example).join(", ")})</span></summary>
    <dl class="facts">${Object.entries(example).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd class="mono">${value.length > 20000 ? `${value.slice(0, 20000)} … ${value.length - 20000} more characters` : value}</dd>`)}</dl></details>`;
}

// What shows samples side by side: the colour of their tokens, by the address, and the keys.
export const colourOf = (query) => (COLOURS.includes(query.colour) ? query.colour : "logprob");
const setColour = (colour) => setQuery({ colour: colour === "logprob" ? null : colour });
export const tokenKeys = (query) => [
  ...COLOURS.map((each, place) => ({ key: String(place + 1), help: `colour by ${each}`, run: () => setColour(each) })),
  { key: "e", help: "open or fold prompts", run: flip("open", query.open) },
];
export const sampleKeys = [["j", "ArrowDown", 1], ["k", "ArrowUp", -1]].flatMap(([letter, arrow, by]) => [letter, arrow].map((key) => ({ key, help: by > 0 ? "next sample" : "previous sample", run: () => stepTo(by) })));

export function ColourBar({ colour, versions }) {
  const host = useRef(null);
  useLayoutEffect(() => host.current.replaceChildren(legendOf(colour, versions)), [colour, versions]);
  return html`<div class="bar">
    <div class="row" role="group" aria-label="Colour of tokens">${COLOURS.map((each) => html`<button type="button" key=${each} aria-pressed=${String(each === colour)} onClick=${() => setColour(each)}>${each}</button>`)}</div>
    <div ref=${host}></div>
  </div>`;
}

export function Sample({ row, colour, versions, open, href }) {
  const host = useRef(null);
  useEffect(() => { if (host.current) showEpisode(host.current, row.shown, { colour, versions, open, brief: true }); }, [row, colour, versions, open]);
  const facts = [row.seconds ? fmt.duration(row.seconds) : null, row.meanLogprob !== null ? `mean logprob ${fmt.number(row.meanLogprob)}` : null, ...row.failures].filter(Boolean);
  return html`<article aria-label=${`sample ${row.sample}`}>
    <header>${href ? html`<b><${Link} href=${href}>sample ${row.sample}<//></b>` : html`<b tabindex="-1">sample ${row.sample}</b>`} <span>reward <b>${row.reward === null ? "none" : fmt.number(row.reward)}</b></span>
      ${row.advantage !== null && html`<span>advantage <b>${fmt.number(row.advantage)}</b></span>`} <span>${plural(row.tokens, "token")}</span> <span class="dim">${facts.join("  ·  ")}</span></header>
    <div ref=${host}></div>
  </article>`;
}
