// `/evaluations[/NAME[/prompt/N]]`: the evaluations of a home, the prompts of one beside another's, one prompt's samples in both.
import { html, useData, useKeys, useMemo, Filter, Link, Loading, Problem, State, Table, fmt, go, setQuery } from "../ui.js";
import { plural, versionsOf } from "../tokens.js";
import { ColourBar, Dots, Example, Sample, colourOf, sampleKeys, tokenKeys } from "./step.js";

const pathOf = (name, prompt) => `/evaluations${name === undefined ? "" : `/${encodeURIComponent(name)}`}${prompt === undefined ? "" : `/prompt/${prompt}`}`;
// What a prompt keeps of the address of its evaluation: what it is compared with, and which prompts are shown.
const kept = ({ against, show }) => { const text = new URLSearchParams(Object.entries({ against, show }).filter(([, value]) => value)).toString(); return text && `?${text}`; };

export const title = ({ params }) => (params.name === undefined ? "evaluations" : `evaluation ${params.name}${params.prompt === undefined ? "" : `, prompt ${params.prompt}`}`);
export const up = ({ params, query }) => (params.prompt !== undefined ? pathOf(params.name) + kept(query) : params.name !== undefined ? pathOf() : "/");

export default function Evaluations({ route }) {
  if (route.params.prompt !== undefined) return html`<${Prompt} route=${route} />`;
  return route.params.name !== undefined ? html`<${Evaluation} route=${route} />` : html`<${All} route=${route} />`;
}

function All({ route }) {
  const { data, error } = useData("evaluations", {});
  const compared = data?.evaluations.some((row) => row.baseline);
  const columns = useMemo(() => (compared ? [...ALL, ...COMPARED, ...LAST] : [...ALL, ...LAST]), [compared]);
  if (!data) return html`<${Loading} error=${error} />`;
  return html`
    <div class="head"><h1>Evaluations</h1><span class="facts"><span><b>${data.evaluations.length}</b></span></span></div>
    ${error && html`<${Problem} error=${error} />`}
    <div class="bar"><${Filter} value=${route.query.q} label="Filter evaluations" placeholder="filter evaluations" /></div>
    <${Table} label="Evaluations" focus columns=${columns} rows=${data.evaluations} rowKey=${(row) => row.name} filterText=${route.query.q} note=${(row) => row.problem && html`<div>${row.problem}</div>`}
      onOpen=${(row) => go(pathOf(row.name))} empty="no evaluation is in this home: areal eval MODEL --dataset FILE --reward FUNCTION" />`;
}

const score = (row, name) => row.scores.find((each) => each.name === name);
const scored = (name, rest) => ({ ...rest, id: name, title: name, value: (row) => score(row, name)?.value, num: true, cell: (row) => { const found = score(row, name); return found ? html`<span title=${interval(found)}>${fmt.number(found.value)}</span>` : ""; } });
const interval = (each) => (each.low === null ? "one prompt has no interval" : `${fmt.number(each.low)} to ${fmt.number(each.high)}`);
const signed = (value) => (value > 0 ? `+${fmt.number(value)}` : fmt.number(value));
const Change = ({ value }) => (value === null || value === undefined ? "" : html`<span class=${value > 0 ? "ok" : value < 0 ? "bad" : "dim"}>${signed(value)}</span>`);

const ALL = [
  { id: "name", title: "Evaluation", value: (row) => row.name, cls: "nowrap", cell: (row) => html`<${Link} href=${pathOf(row.name)} tabindex="-1">${row.name}<//>` },
  { id: "target", title: "Of", value: (row) => row.target, cls: "breaks" },
  { id: "dataset", title: "Data set", value: (row) => row.dataset, cls: "clip wide", hide: 820 },
  scored("pass@1"), scored("reward", { hide: 560 }),
];
const COMPARED = [
  { id: "baseline", title: "Baseline", value: (row) => row.baseline, hide: 560, cls: "nowrap" },
  { id: "change", title: "Change", value: (row) => row.change, num: true, cell: (row) => html`<${Change} value=${row.change} />${row.dropped ? html` <span class="bad">significant</span>` : ""}`, cls: "nowrap" },
];
const LAST = [
  { id: "done", title: "Episodes", value: (row) => row.done, num: true, hide: 560, cls: "nowrap", cell: (row) => (row.isFinished ? `${fmt.number(row.done)}${row.done < row.planned ? ` of ${fmt.number(row.planned)}` : ""}` : html`<${State} value="not finished" />`) },
  { id: "at", title: "When", value: (row) => row.at, hide: 560, cls: "nowrap", search: () => "", cell: (row) => fmt.clock(row.at) },
];

function Evaluation({ route }) {
  const { params, query } = route;
  const { data, error } = useData("evaluations", { name: params.name, against: query.against, show: query.show });
  const shows = data?.against ? ["changed", "worse", "better", "all"] : ["all"];
  const choose = (show) => setQuery({ show: show === shows[0] ? null : show });
  useKeys([{ key: "v", help: "prompts: changed, worse, better, all", run: () => data && choose(shows[(shows.indexOf(query.show ?? data.show) + 1) % shows.length]) }]);
  const columns = useMemo(() => (data?.against ? [...PROMPT, ...AGAINST] : [...PROMPT, ...ALONE]), [data?.against]);
  if (!data) return html`<${Loading} error=${error} />`;
  return html`
    <div class="head">
      <h1>${data.name}</h1> ${!data.isFinished && html`<${State} value="not finished" />`}
      <span class="facts">${data.target && html`<span>${data.target.includes("/") ? html`<${Link} href=${`/job/${encodeURIComponent(data.target.split("/")[1].split("@")[0])}`}>${data.target}<//>` : data.target}</span>`}
        ${data.dataset && html`<span>on <span class="mono">${data.dataset}</span></span>`} ${data.done !== null && html`<span><b>${fmt.number(data.done)}</b> of ${plural(data.planned, "episode")}</span>`}
        ${data.samples !== null && html`<span>${plural(data.samples, "sample")} a prompt</span>`} ${data.threshold !== null && html`<span>passes from a reward of ${fmt.number(data.threshold)}</span>`}
        ${data.tokens !== null && html`<span><b>${fmt.number(data.tokens)}</b> tokens an episode</span>`} ${data.truncated > 0 && html`<span class="warn">${data.truncated} truncated</span>`}
        ${Object.entries(data.failures).map(([kind, count]) => html`<span class="warn" key=${kind}>${count} failed: ${kind}</span>`)} <span class="mono dim">${data.folder}</span></span>
    </div>
    ${error && html`<${Problem} error=${error} />`}
    ${data.problem && html`<div class="problem"><pre>${data.problem}</pre></div>`}
    ${data.damaged.map((each) => html`<div class="problem" key=${each}><pre>${each}</pre></div>`)}
    ${!data.isFinished && !data.problem && html`<p class="dim">Scores are written when it ends. After a kill, the same command with --resume goes on.</p>`}
    ${data.againstProblem && html`<div class="problem"><pre>${data.againstProblem}</pre></div>`}
    <div class="step-top">
      ${data.scores.length > 0 && html`<${Scores} label="Scores" rows=${data.scores} data=${data} />`}
      ${data.difference.length > 0 && html`<${Scores} label=${`Difference to ${data.against}, prompt by prompt`} rows=${data.difference} data=${data} isDifference />`}
    </div>
    ${data.against && data.both > 0 && html`<p><b class="ok">${data.better}</b> ${data.better === 1 ? "prompt" : "prompts"} better, <b class=${data.worse ? "bad" : ""}>${data.worse}</b> worse, <b>${data.both - data.better - data.worse}</b> alike${data.isDropped ? html`. <b class="bad">It is significantly worse.</b>` : ""}</p>`}
    <div class="bar">
      <${Filter} value=${query.q} label="Filter prompts" placeholder="filter prompts" />
      ${(data.choices.length > 0 || data.baseline) && html`<label class="row">against <select onChange=${(event) => setQuery({ against: event.target.value, show: null })}>${[...new Set(["none", data.baseline, ...data.choices].filter(Boolean))].map((each) => html`<option key=${each} value=${each} selected=${each === (data.against ?? query.against ?? data.baseline ?? "none")}>${each}</option>`)}</select></label>`}
      ${shows.length > 1 && html`<div class="row" role="group" aria-label="Prompts">${shows.map((each) => html`<button type="button" key=${each} aria-pressed=${String(each === data.show)} onClick=${() => choose(each)}>${each}</button>`)}</div>`}
    </div>
    <${Table} label="Prompts" focus columns=${columns} rows=${data.prompts} rowKey=${(row) => String(row.prompt)} filterText=${query.q} href=${(row) => pathOf(params.name, row.prompt) + kept(query)}
      empty=${data.against && data.show !== "all" ? "no prompt of this kind: v shows others" : "no sample is written yet"} />
    ${data.leftOut > 0 && html`<p class="dim">${plural(data.leftOut, "more prompt")} ${data.leftOut === 1 ? "is" : "are"} not listed</p>`}`;
}

function Scores({ label, rows, data, isDifference }) {
  return html`<div class="scroll"><table><caption>${label}</caption>
    <thead><tr><th scope="col">Score</th><th scope="col" class="num">${isDifference ? "Change" : "Value"}</th><th scope="col" class="num">${fmt.number(data.confidence)} interval</th><th scope="col" class="num">Prompts</th></tr></thead>
    <tbody>${rows.map((each) => html`<tr key=${each.name}><td>${each.name}</td><td class="num">${isDifference ? html`<${Change} value=${each.value} />` : fmt.number(each.value)}</td><td class="num nowrap">${interval(each)}</td><td class="num">${fmt.number(each.prompts)}</td></tr>`)}</tbody></table></div>`;
}

const passes = (side) => (side ? `${side.passes}/${side.rewards.length}` : "");
const answers = (side) => (side ? side.answers.join("   ") : "");
const PROMPT = [
  { id: "prompt", title: "Prompt", value: (row) => row.prompt, num: true },
  { id: "question", title: "Question", value: (row) => row.question, cls: "clip wide" },
];
const ALONE = [
  { id: "answers", title: "Answer", value: (row) => answers(row.now), cls: "clip wide mono", hide: 820 },
  { id: "rewards", title: "Rewards", value: (row) => row.now.mean, sort: false, search: () => "", hide: 560, cell: (row) => html`<${Dots} samples=${row.now.rewards.map((reward) => ({ reward }))} />` },
  { id: "passes", title: "Passes", value: (row) => row.now.passes, num: true, cell: (row) => passes(row.now) },
  { id: "mean", title: "Reward", value: (row) => row.now.mean, num: true, cell: (row) => fmt.number(row.now.mean) },
];
const AGAINST = [
  { id: "answer-before", title: "Answer before", value: (row) => answers(row.before), cls: "clip mono", hide: 820 },
  { id: "answer", title: "Answer now", value: (row) => answers(row.now), cls: "clip mono", hide: 820 },
  { id: "before", title: "Before", value: (row) => row.before?.passes, num: true, cls: "nowrap", hide: 560, cell: (row) => (row.before ? passes(row.before) : html`<span class="dim">none</span>`) },
  { id: "now", title: "Passes", value: (row) => row.now.passes, num: true, cls: "nowrap", cell: (row) => passes(row.now) },
  { id: "change", title: "Change", value: (row) => row.change, num: true, cell: (row) => html`<${Change} value=${row.change} />` },
];

function Prompt({ route }) {
  const { params, query } = route;
  const colour = colourOf(query);
  const { data, error } = useData("evaluations", { name: params.name, prompt: params.prompt, against: query.against, show: query.show });
  const to = (prompt) => prompt !== null && prompt !== undefined && go(pathOf(params.name, prompt) + kept(query) + (query.colour ? `${kept(query) ? "&" : "?"}colour=${query.colour}` : ""));
  useKeys([
    ...tokenKeys(query), ...sampleKeys,
    { key: "ArrowRight", help: "next prompt of those that are shown", run: () => to(data?.next) },
    { key: "ArrowLeft", help: "previous prompt of those that are shown", run: () => to(data?.previous) },
  ]);
  const versions = useMemo(() => versionsOf((data?.sides ?? []).flatMap((side) => side.episodes.map((each) => each.shown))), [data]);
  if (!data) return html`<${Loading} error=${error} />`;
  const link = (prompt, words) => (prompt === null ? html`<span class="dim">${words}</span>` : html`<${Link} href=${pathOf(params.name, prompt) + kept(query)}>${words}<//>`);
  const first = data.sides[0].episodes[0];
  return html`
    <div class="head">
      <h1><${Link} href=${pathOf(params.name) + kept(query)}>${params.name}<//> prompt ${params.prompt}</h1>
      <span class="facts">${link(data.previous, "← previous")} ${link(data.next, "next →")} <span>of ${data.show === "all" ? "all prompts" : `the prompts that ${data.show === "changed" ? "changed" : `are ${data.show}`}`}</span></span>
    </div>
    ${error && html`<${Problem} error=${error} />`}
    ${data.againstProblem && html`<div class="problem"><pre>${data.againstProblem}</pre></div>`}
    ${!data.decoded && html`<p class="dim">Token ids are shown: the tokenizer is not on this machine.</p>`}
    ${first && Object.keys(first.shown.example).length > 0 && html`<${Example} example=${first.shown.example} question=${first.question} />`}
    <${ColourBar} colour=${colour} versions=${versions} />
    <div class="side pair">
      ${[...data.sides].reverse().map((side) => html`<section key=${side.name} aria-label=${side.name}>
        <div class="head"><h2>${side.name}</h2><span class="facts"><span>mean reward <b>${fmt.number(side.group.mean)}</b></span><span><b>${plural(side.group.samples.length, "sample")}</b></span></span></div>
        ${side.episodes.map((each) => html`<${Sample} key=${each.episode} row=${each} colour=${colour} versions=${versions} open=${query.open ? true : false} />`)}
        ${side.leftOut > 0 && html`<p class="dim">${plural(side.leftOut, "more sample")} ${side.leftOut === 1 ? "is" : "are"} not shown: areal inf trajectories show</p>`}
      </section>`)}
    </div>
    ${data.against && data.sides.length === 1 && html`<p class="dim">${data.against} has no sample of this prompt.</p>`}`;
}
