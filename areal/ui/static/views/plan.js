// `/plan`: live drift, or what applying a manifest would do: objects, deciding fields, steps with their causes.
import { html, useData, useEffect, useKeys, useMemo, useRef, useState, call, Table, Link, Loading, Problem, flip, objectPath, setQuery, go } from "../ui.js";

export const title = (route) => (route.query.path ? `plan ${route.query.path}` : "plan");

export default function PlanView({ route }) {
  const { path, recursive, assume } = route.query;
  const [pasted, setPasted] = useState(null); // { data, error } of a manifest that was pasted
  const found = useData("plan", { path, recursive, assume });
  const area = useRef(null);
  const { data, error } = pasted ?? (found.isCurrent ? found : { data: null, error: null }); // no plan of another file
  useKeys([
    { key: "d", help: "drift, without a manifest", run: () => { setPasted(null); setQuery({ path: null, recursive: null }); } },
    { key: "c", help: "assume that there is capacity", run: flip("assume", assume) },
  ]);
  const paste = async (event) => {
    event.preventDefault();
    const text = new FormData(event.target).get("text");
    try { setPasted({ data: (await call("plan", { assume }, { body: { text } })).data, error: null }); } catch (failure) { setPasted({ data: null, error: failure }); }
  };
  const open = (event) => {
    event.preventDefault();
    setPasted(null);
    setQuery({ path: new FormData(event.target).get("path").trim() || null });
  };
  const what = pasted ? "a pasted manifest" : path ? path : "what is recorded, against what runs";
  const objects = useMemo(() => (data?.objects ?? []).filter((each) => each.action !== "unchanged" || objectsOfDrift(data).has(each.ref)), [data]);
  const unchanged = (data?.objects.length ?? 0) - objects.length;
  return html`
    <div class="head"><h1>Plan</h1><span class="facts"><span>${what}</span>${data && html`<b>${data.summary}</b>`}</span></div>
    <form class="bar" onSubmit=${open}>
      <input type="search" data-filter name="path" key=${path} defaultValue=${path ?? ""} placeholder="/path/to/manifest.yaml  (/)" aria-label="Path of a manifest or folder" autocomplete="off" spellcheck=${false} />
      <button type="submit">Plan the file</button>
      <button type="button" aria-pressed=${String(!path && !pasted)} onClick=${() => { setPasted(null); setQuery({ path: null }); }}>Drift</button>
      <label><input type="checkbox" checked=${Boolean(assume)} onChange=${(event) => setQuery({ assume: event.target.checked ? 1 : null })} /> assume capacity</label>
      <label><input type="checkbox" checked=${Boolean(recursive)} onChange=${(event) => setQuery({ recursive: event.target.checked ? 1 : null })} /> folders recursively</label>
    </form>
    <details><summary>Paste a manifest</summary>
      <form onSubmit=${paste}><textarea ref=${area} name="text" class="mono wide" rows="12" aria-label="Manifest" spellcheck=${false}></textarea>
      <div class="bar"><button type="submit">Plan the text</button></div></form></details>
    ${error && html`<${Problem} error=${error} />`}
    ${!data ? !error && html`<${Loading} />` : html`
      ${data.faults.map((fault, at) => html`<div class="problem" key=${at}><pre><span class="mono">${where(fault)}</span> ${fault.path ? html`<span class="mono">${fault.path}</span> ` : ""}${fault.message}</pre>${fault.hint && html`<p class="hint">${fault.hint}</p>`}</div>`)}
      ${data.destructive.map((sentence) => html`<div class="problem" key=${sentence}><pre>${sentence}</pre></div>`)}
      ${data.unknown.map((sentence) => html`<p class="warn" key=${sentence}>Unknown, and left alone: ${sentence}</p>`)}
      <${Table} focus label="Objects" columns=${OBJECTS} rows=${objects} rowKey=${(row) => row.ref} note=${changes} onOpen=${(row) => go(objectPath(row.ref))} caption="Objects"
        empty=${unchanged ? `nothing to do: ${unchanged} unchanged` : "nothing to do"} />
      ${data.drift.length > 0 && html`<${Table} label="Drift" caption="Drift: what left the record" name="drift" sortName="driftsort" columns=${DRIFT} rows=${data.drift} rowKey=${(row) => `${row.ref} ${row.target} ${row.kind}`} onOpen=${(row) => go(objectPath(row.ref))} />`}
      ${data.ops.length > 0 && html`<${Table} label="Steps" caption="Steps, in order" name="step" sortName="stepsort" columns=${STEPS} rows=${data.ops} rowKey=${(row) => String(row.id)} onOpen=${(row) => go(objectPath(row.ref))} />`}
      ${unchanged > 0 && objects.length > 0 && html`<p class="dim">${unchanged} unchanged</p>`}
      <p class="dim">${!data.ops.length ? "" : path ? html`Carry it out with <code>areal apply -f ${path}</code>` : pasted ? html`Carry it out with <code>areal apply -f FILE</code>` : html`Heal it with <code>areal reconcile</code>`}</p>`}`;
}

const objectsOfDrift = (data) => new Set(data.drift.map((each) => each.ref));
const where = (fault) => [fault.file, fault.line, fault.column ?? fault.col].filter((each) => each !== undefined && each !== null && each !== "").join(":");
const SIGN = { create: "+", configure: "~", heal: "~", replace: "-/+", prune: "-", delete: "-", blocked: "?", unchanged: "" };
const TONE = { create: "ok", configure: "warn", heal: "warn", replace: "bad", prune: "bad", delete: "bad", blocked: "bad" };
const value = (each) => (each === null ? "(not set)" : JSON.stringify(each));

function changes(row) {
  const parts = [
    ...row.changes.map((each) => html`<div key=${each.path}><span class="mono">${each.path}</span> <span class="bad mono">${value(each.old)}</span> → <span class="ok mono">${value(each.new)}</span> <span class="dim">${each.update}${each.path === row.decidedBy ? ", decides" : ""}</span></div>`),
    ...row.taken.map((sentence) => html`<div key=${sentence} class="warn">took ${sentence}</div>`),
    ...(row.refusal ? [html`<div key="refusal"><span class="bad">${row.refusal.message}</span> <span class="dim">${row.refusal.hint}</span></div>`] : []),
  ];
  return parts.length ? parts : null;
}

const OBJECTS = [
  { id: "action", title: "Action", value: (row) => row.action, cls: "nowrap", cell: (row) => html`<span class=${TONE[row.action] ?? "dim"}><span class="mono">${SIGN[row.action] ?? ""}</span> ${row.action}</span>` },
  { id: "ref", title: "Object", value: (row) => row.ref, cell: (row) => html`<${Link} tabindex="-1" href=${objectPath(row.ref)}>${row.ref}<//>` },
  { id: "cause", title: "Cause", value: (row) => row.cause },
  { id: "decided", title: "Decided by", value: (row) => row.decidedBy, cls: "mono", optional: true },
];
const DRIFT = [
  { id: "ref", title: "Object", value: (row) => row.ref, cell: (row) => html`<${Link} tabindex="-1" href=${objectPath(row.ref)}>${row.ref}<//>` },
  { id: "target", title: "What", value: (row) => row.target },
  { id: "kind", title: "Drift", value: (row) => row.kind, cell: (row) => html`<span class="warn">${row.kind}</span>` },
  { id: "message", title: "Message", value: (row) => row.message },
];
const STEPS = [
  { id: "id", title: "#", value: (row) => row.id, num: true },
  { id: "verb", title: "Step", value: (row) => row.verb, cls: "nowrap" },
  { id: "ref", title: "Object", value: (row) => row.ref },
  { id: "target", title: "What", value: (row) => row.target },
  { id: "cause", title: "Cause", value: (row) => row.cause },
  { id: "needs", title: "After", value: (row) => row.needs.join(", "), num: true, hide: 560 },
];
