// `/agents/NAME[/session/S]` and `/sessions[/NAME[/session/S]]`: sessions of agents and recorded ones, their turns and tokens.
import { html, useData, useEffect, useKeys, useLayoutEffect, useRef, useState, call, Filter, Link, Loading, Problem, State, Table, fmt, go, objectPath, sessionsPath, setQuery } from "../ui.js";
import { Actions } from "../actions.js";
import { plural, readable, showEpisode, versionsOf } from "../tokens.js";
import { ColourBar, colourOf, tokenKeys } from "./step.js";

const kindOf = (route) => (route.path.startsWith("/agents/") ? "agentservice" : "inferenceservice");
export const title = (route) => (route.params.session ? `session ${route.params.session}` : route.params.name ? `sessions of ${route.params.name}` : "sessions");
export const up = (route) => (route.params.session ? sessionsPath(kindOf(route), route.params.name) : route.params.name ? "/sessions" : "/");

export default function Sessions({ route }) {
  const { name, session } = route.params;
  if (!name) return html`<${Services} route=${route} />`;
  if (!session) return html`<${List} route=${route} kind=${kindOf(route)} />`;
  return kindOf(route) === "agentservice" ? html`<${AgentSession} route=${route} />` : html`<${Recorded} route=${route} />`;
}

function Services({ route }) {
  const { data, error } = useData("sessions", {});
  if (!data) return html`<h1>Sessions</h1><${Loading} error=${error} />`;
  return html`<div class="head"><h1>Sessions</h1><span class="facts"><span>of agents, and recorded ones of models</span></span></div>
    ${error && html`<${Problem} error=${error} />`}
    <${Table} focus label="Services" columns=${SERVICES} rows=${data.services} rowKey=${(row) => row.ref} filterText=${route.query.q} onOpen=${(row) => go(sessionsPath(row.kind, row.name))}
      note=${(row) => (row.message && row.phase !== "Ready" ? html`<span class="bad">${row.message}</span>` : null)} empty="no service is recorded in this home: areal apply -f FILE, or areal init agentservice" />`;
}

// The sessions that were read so far. More are asked for behind the last one.
function List({ route, kind }) {
  const { name } = route.params;
  const { q } = route.query;
  const [more, setMore] = useState([]);
  const [failed, setFailed] = useState(null);
  const { data, error } = useData("sessions", { kind, name, q });
  useEffect(() => setMore([]), [q]);
  const last = more.at(-1) ?? data;
  const load = () => last?.next && call("sessions", { kind, name, q, after: last.next }).then((found) => { setFailed(null); setMore((old) => [...old, found.data]); }, setFailed);
  useKeys([{ key: "m", help: "more sessions", run: load }]);
  if (!data) return html`<h1>Sessions of ${name}</h1><${Loading} error=${error} />`;
  const rows = [...new Map([data, ...more].flatMap((page) => page.sessions).map((row) => [row.id, row])).values()];
  const read = [data, ...more].reduce((sum, page) => sum + page.read, 0);
  return html`<div class="head"><h1>Sessions of <${Link} href=${objectPath(`${kind === "agentservice" ? "AgentService" : "InferenceService"}/${name}`)}>${name}<//></h1><span class="facts"><span>${q ? html`<b>${fmt.number(rows.length)}</b> of ${fmt.number(read)} read` : html`<b>${plural(rows.length, "session")}</b>`}</span></span></div>
    ${(failed ?? error) && html`<${Problem} error=${failed ?? error} />`}
    ${data.away > 0 && html`<p class="warn">sessions of ${data.away} data proxies that are away are not listed</p>`}
    <div class="bar"><${Filter} value=${q} label="Filter sessions" placeholder="filter sessions" /></div>
    <${Table} focus label="Sessions" columns=${kind === "agentservice" ? OF_AGENTS : OF_MODELS} rows=${rows} rowKey=${(row) => row.id} href=${(row) => sessionsPath(kind, name, row.id)} empty=${q ? "none matches the filter" : "no session"} />
    ${last?.next && html`<button type="button" onClick=${load}>More (m)</button>`}`;
}

const short = (text) => (text.length > 40 ? `${text.slice(0, 40)}…` : text);

function AgentSession({ route }) {
  const { name, session } = route.params;
  const { q, before } = route.query;
  const asked = { kind: "agentservice", name, session };
  const { data, error } = useData("sessions", { ...asked, q, before });
  const turns = useRef(null);
  const move = (by) => {
    const all = [...(turns.current?.children ?? [])];
    const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(document.activeElement) + by))];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  useKeys([
    { key: "j", help: "next turn", run: () => move(1) },
    { key: "k", help: "previous turn", run: () => move(-1) },
    { key: "[", help: "older turns", run: () => data?.older && setQuery({ before: data.turns[0].number }) },
    { key: "]", help: "the newest turns", run: () => setQuery({ before: null }) },
  ]);
  if (!data) return html`<h1>Session ${short(session)}</h1><${Loading} error=${error} />`;
  const { session: row } = data;
  return html`<div class="head"><h1>Session <span class="mono">${short(session)}</span></h1> <${State} value=${row.state} />
      <span class="facts"><span><b>${plural(data.count, "turn")}</b></span><span>begun ${fmt.ago(row.created)}</span><span>used ${fmt.ago(row.used)}</span><${Link} href=${sessionsPath("agentservice", name)}>${name}<//></span>
      <span class="grow"></span> <${Actions} target=${asked} verbs=${[...(row.recorded ? ["reward"] : []), "end-session"]} /></div>
    ${error && html`<${Problem} error=${error} />`}
    ${Object.keys(row.metadata ?? {}).length > 0 && html`<p class="mono dim">${JSON.stringify(row.metadata)}</p>`}
    <${Trained} asked=${asked} recorded=${row.recorded} by=${data.recordedBy} count=${data.calls.length} />
    ${data.unseen && html`<p class="warn">${data.unseen}</p>`}
    <div class="bar"><${Filter} value=${q} label="Filter turns" placeholder="filter turns" />
      ${(data.older || before) && html`<button type="button" disabled=${!data.older} onClick=${() => setQuery({ before: data.turns[0].number })}>Older ([)</button> <button type="button" disabled=${!before} onClick=${() => setQuery({ before: null })}>Newest (])</button>`}
      <span class="dim">${data.turns.length ? `turns ${data.turns[0].number} to ${data.turns.at(-1).number} of ${data.matching}` : q ? "no turn matches" : "no turn has ended yet"}</span></div>
    <div ref=${turns}>${data.turns.map((turn) => html`<${Turn} key=${turn.number} turn=${turn} />`)}</div>
    ${row.state === "running" && !before && html`<p class="panel talk" role="status"><b class="ok">turn ${data.count + 1} runs</b>, for ${fmt.age(Date.now() / 1000 - row.used)}. Its messages are shown when it has ended.${row.waiting > 0 ? ` ${plural(row.waiting, "more message")} ${row.waiting === 1 ? "waits" : "wait"}.` : ""}</p>`}
    ${data.calls.length > 0 && html`<${Table} label="Model calls" caption="Recorded model calls" name="call" sortName="callsort" columns=${CALLS} rows=${data.calls} rowKey=${(each) => each.id} />`}`;
}

function Turn({ turn }) {
  const unanswered = turn.outcome === "complete" && turn.messages.at(-1)?.role !== "assistant";
  const messages = unanswered ? [...turn.messages, { role: "assistant", text: "", cut: 0, calls: [] }] : turn.messages;
  return html`<article class="panel talk" tabindex="-1" aria-label=${`turn ${turn.number}`}>
    <header><b>turn ${turn.number}</b><span>${fmt.clock(turn.at)}</span><span>${fmt.duration(turn.seconds)}</span><span class=${turn.error ? "bad" : ""}>${turn.outcome}</span></header>
    ${messages.map((each, at) => html`<div class="say" key=${at}><span>${each.role}</span><div>
      ${!each.text.trim() && !each.calls.length && html`<span class="dim">no text</span>`}
      ${(each.text.trim() || each.cut > 0) && html`<${Text} cls=${each.role === "tool" ? "result" : ""} text=${each.text} cut=${each.cut} />`}
      ${each.calls.map((one, place) => html`<${Text} key=${place} cls="call" text=${`${one.name}(${one.text})`} cut=${one.cut} />`)}</div></div>`)}
    ${turn.error && html`<div class="say"><span>error</span><pre class="bad">${turn.error}</pre></div>`}
  </article>`;
}

function Text({ text, cut, cls }) {
  const host = useRef(null);
  useLayoutEffect(() => { host.current.replaceChildren(...readable(text, 20000), ...(cut ? [` … ${fmt.number(cut)} more characters`] : [])); }, [text, cut]);
  return html`<pre ref=${host} class=${cls}></pre>`;
}

// Where the session's tokens are, and what jobs trained on. Looked for once, and again after further calls.
function Trained({ asked, recorded, by, count }) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    if (recorded) call("sessions", { ...asked, trained: 1 }).then(({ data }) => setFound(data.trained ?? null), () => setFound(null));
  }, [asked.session, recorded, count]);
  if (!recorded) return null;
  const path = (each) => `/job/${encodeURIComponent(each.job)}/step/${each.step}/group/${encodeURIComponent(each.group)}/sample/${each.sample}${each.isEval ? "?eval=1" : ""}`;
  return html`<p class="facts">${asked.session !== recorded && html`<span>recorded as ${by ? html`<${Link} class="mono" href=${sessionsPath("inferenceservice", by, recorded)}>${recorded}<//>` : html`<span class="mono">${recorded}</span>`} </span>`}
    ${found?.samples.map((each) => html`<span key=${path(each)}>trained on: <${Link} href=${path(each)}>${each.job} step ${each.step}, sample ${each.sample}<//> </span>`)}
    ${found && !found.samples.length && html`<span class="dim">no job has trained on it${found.whole ? "" : ", in the samples that were searched"}</span>`}</p>`;
}

function Recorded({ route }) {
  const { name, session } = route.params;
  const colour = colourOf(route.query);
  const asked = { kind: "inferenceservice", name, session };
  const { data, error } = useData("sessions", asked);
  const [tokens, setTokens] = useState(null);
  const count = data?.calls.length;
  useEffect(() => { if (count !== undefined) call("sessions", { ...asked, tokens: 1 }).then((found) => setTokens(found.data), (failure) => setTokens({ error: failure })); }, [session, count]);
  useKeys(tokenKeys(route.query));
  if (!data) return html`<h1>Session ${short(session)}</h1><${Loading} error=${error} />`;
  const { session: row } = data;
  const versions = versionsOf(tokens?.episodes ?? []);
  return html`<div class="head"><h1>Session <span class="mono">${short(session)}</span></h1> <${State} value=${row.state} />
      <span class="facts"><span><b>${plural(row.turns, "call")}</b></span>${row.reward !== null && html`<span>reward <b>${fmt.number(row.reward)}</b></span>`}<span>task <b>${row.task}</b></span>${row.group && html`<span>group ${row.group}</span>`}<span>begun ${fmt.ago(row.created)}</span><${Link} href=${sessionsPath("inferenceservice", name)}>${name}<//></span>
      <span class="grow"></span> <${Actions} target=${asked} verbs=${row.state === "ended" ? ["reward"] : ["reward", "end-session"]} /></div>
    ${error && html`<${Problem} error=${error} />`}
    <${Trained} asked=${asked} recorded=${session} by=${null} count=${count} />
    ${data.failures.map((each) => html`<p class="warn" key=${each.trajectory}>trajectory ${each.trajectory}: ${each.error ?? Object.entries(each.codes).map(([code, times]) => `${code} ×${times}`).join(", ")}</p>`)}
    <${Table} focus label="Model calls" caption="Model calls" columns=${CALLS} rows=${data.calls} rowKey=${(each) => each.id} empty="no call is recorded" />
    ${tokens?.error && html`<${Problem} error=${tokens.error} />`}
    ${tokens?.episodes?.length > 0 && html`<${ColourBar} colour=${colour} versions=${versions} />
      ${tokens.episodes.map((each) => html`<${Episode} key=${each.name} episode=${each} colour=${colour} versions=${versions} open=${route.query.open ? true : null} />`)}
      ${tokens.leftOut > 0 && html`<p class="dim">${tokens.leftOut} more trajectories are not shown</p>`}`}`;
}

function Episode({ episode, colour, versions, open }) {
  const host = useRef(null);
  useEffect(() => { showEpisode(host.current, episode, { colour, versions, open }); }, [episode, colour, open]);
  return html`<div ref=${host}></div>`;
}

const SERVICES = [
  { id: "name", title: "Service", value: (row) => row.name, cell: (row) => html`<${Link} tabindex="-1" href=${sessionsPath(row.kind, row.name)}>${row.name}<//>` },
  { id: "kind", title: "Sessions of", value: (row) => (row.kind === "AgentService" ? "agents" : "model calls") },
  { id: "phase", title: "Status", optional: true, value: (row) => row.phase, cell: (row) => (row.phase ? html`<${State} value=${row.phase} />` : "") },
  { id: "address", title: "Address", value: (row) => row.address, cls: "mono", hide: 560 },
];
const age = { id: "created", title: "Age", value: (row) => (row.created ? Date.now() / 1000 - row.created : null), num: true, cls: "nowrap", cell: (row) => (row.created ? fmt.age(Date.now() / 1000 - row.created) : "") };
const id = { id: "id", title: "Session", value: (row) => row.id, cls: "mono" };
const state = { id: "state", title: "State", value: (row) => row.state, cell: (row) => html`<${State} value=${row.state ?? ""} />` };
const OF_AGENTS = [
  id, state,
  { id: "turns", title: "Turns", value: (row) => row.turns, num: true },
  { id: "waiting", title: "Waiting", value: (row) => row.waiting, num: true, optional: true },
  age,
  { id: "idle", title: "Idle", value: (row) => (row.state === "idle" ? Date.now() / 1000 - row.used : null), num: true, cls: "nowrap", hide: 560, optional: true, cell: (row) => (row.state === "idle" ? fmt.age(Date.now() / 1000 - row.used) : "") },
  { id: "recorded", title: "Recorded as", value: (row) => row.recorded, cls: "mono", optional: true, hide: 820 },
  { id: "metadata", title: "Metadata", value: (row) => (Object.keys(row.metadata ?? {}).length ? JSON.stringify(row.metadata) : null), cls: "mono", optional: true, hide: 820 },
];
const OF_MODELS = [
  id, state,
  { id: "task", title: "Task", value: (row) => row.task, hide: 560 },
  { id: "turns", title: "Calls", value: (row) => row.turns, num: true },
  { id: "reward", title: "Reward", value: (row) => row.reward, num: true, cell: (row) => (row.reward === null ? "" : fmt.number(row.reward)) },
  { id: "ready", title: "Ready", value: (row) => row.ready, num: true, hide: 560 },
  { id: "group", title: "Group", value: (row) => row.group, optional: true, hide: 820 },
  age,
];
const CALLS = [
  { id: "id", title: "Call", value: (row) => row.id, cls: "mono", hide: 820 },
  { id: "trajectory", title: "Trajectory", value: (row) => row.trajectory, num: true },
  { id: "state", title: "State", value: (row) => row.state },
  { id: "prompt", title: "Prompt", value: (row) => row.prompt, num: true, hide: 560 },
  { id: "tokens", title: "Tokens", value: (row) => row.tokens, num: true },
  { id: "finish", title: "Finish", value: (row) => row.finish, hide: 560 },
  { id: "reward", title: "Reward", value: (row) => row.reward, num: true, cell: (row) => (row.reward === null ? "" : fmt.number(row.reward)) },
  { id: "at", title: "When", value: (row) => row.at, cls: "nowrap", hide: 560, cell: (row) => fmt.clock(row.at) },
];
