// Changes, where the server allows them: buttons, the dialog that shows the plan and asks for the name, what runs now.
import { html, useData, useKeys, useAbout, useEffect, useRef, useState, call, Problem, fmt } from "./ui.js";

const NAMES = { restart: "Restart", suspend: "Suspend", resume: "Resume", scale: "Scale", "end-session": "End session", reward: "Reward" };
const KEYS = { restart: "R", suspend: "X", resume: "X", scale: "N", "end-session": "E", reward: "W" };
const NUMBERS = { scale: ["replicas", "Replicas", { min: 0, step: 1 }], reward: ["reward", "Reward", { step: "any" }] };

// Buttons for what `target` names ({ kind, name, session?, interaction? }); nothing where the server allows no change.
export function Actions({ target, verbs }) {
  const about = useAbout();
  const [verb, setVerb] = useState(null);
  const allowed = about?.actions ? verbs : [];
  useKeys(allowed.map((each) => ({ key: KEYS[each], help: NAMES[each].toLowerCase(), run: () => setVerb(each) })));
  return html`${allowed.map((each) => html`<button key=${each} type="button" title=${`${NAMES[each].toLowerCase()} (${KEYS[each]})`} onClick=${() => setVerb(each)}>${NAMES[each]}</button>`)}
    ${verb && html`<${ActionDialog} asked=${{ ...target, verb }} close=${() => setVerb(null)} />`}`;
}

function ActionDialog({ asked, close }) {
  const [field, label, limits] = NUMBERS[asked.verb] ?? [];
  const [given, setGiven] = useState(field ? null : {});
  const [plan, setPlan] = useState(null);
  const [error, setError] = useState(null);
  const [number, setNumber] = useState(null); // of the change, once it has begun
  const input = useRef(null);
  const look = () => {
    setError(null);
    setPlan(null);
    call("action", {}, { body: { ...asked, ...given } }).then(({ data }) => setPlan(data.plan), setError);
  };
  useEffect(() => { if (given) look(); }, [given]);
  useEffect(() => { input.current?.focus(); }, [plan, given]);
  const begin = async (event) => {
    event.preventDefault();
    setError(null);
    try {
      const { data } = await call("action", {}, { body: { ...asked, ...given, digest: plan.digest, confirm: input.current.value.trim() } });
      setNumber(data.action.number);
    } catch (failure) { setError(failure); }
  };
  const choose = (event) => { event.preventDefault(); setGiven({ [field]: Number(input.current.value) }); };
  const show = (element) => { if (element && !element.open) element.showModal(); };
  return html`<dialog ref=${show} class="action" onClose=${close} aria-labelledby="action-title">
    <div class="row"><h1 id="action-title" class="grow">${NAMES[asked.verb]} ${asked.session ? "" : `${asked.kind}/`}${asked.session ?? asked.name}</h1><button type="button" onClick=${close}>Close</button></div>
    ${error && html`<${Problem} error=${error} />${error.status === 409 && number === null && html`<button type="button" onClick=${look}>Look at the new plan</button>`}`}
    ${!given && html`<form onSubmit=${choose}><label>${label} <input ref=${input} type="number" required ...${limits} /></label> <button type="submit">Show the plan</button></form>`}
    ${given && !plan && !error && html`<p role="status" class="dim">making the plan</p>`}
    ${plan && number === null && html`
      <p class="mono">${plan.words}</p>
      <pre class="plan" tabindex="0" role="region" aria-label="Plan">${plan.lines.join("\n")}</pre>
      ${plan.destructive.map((line) => html`<p class="bad" key=${line}>${line}</p>`)}
      ${plan.empty ? html`<p>There is nothing to do.</p>` : html`<form onSubmit=${begin}>
        <label>Type <b class="mono">${plan.confirm}</b> to do it <input ref=${input} type="text" autocomplete="off" spellcheck=${false} required /></label> <button type="submit">${NAMES[asked.verb]}</button></form>`}`}
    ${number !== null && html`<${Progress} number=${number} />`}
  </dialog>`;
}

function Progress({ number }) {
  const { data, error } = useData("action", {});
  const action = data?.actions.find((each) => each.number === number);
  if (error) return html`<${Problem} error=${error} />`;
  return html`<p role="status">${action ? `${action.words}: ${action.state}, ${fmt.duration(action.seconds)}` : "begins"}. It goes on when this is closed.</p>
    ${action?.progress.length > 0 && html`<pre class="plan" tabindex="0" role="region" aria-label="Progress">${action.progress.map((each) => `${each.ref}: ${each.stage}`).join("\n")}</pre>`}
    ${action?.outcome.map((line) => html`<p key=${line}>${line}</p>`)}
    ${action?.error && html`<${Problem} error=${action.error} />`}`;
}

// The change that runs, or failed within the last minute, on every page.
export function RunningAction() {
  const { data } = useData("action", {});
  const action = data?.actions[0];
  if (!action || action.state === "done") return null;
  const last = action.progress.at(-1);
  return html`<p class=${`acting ${action.state}`} role="status"><b class=${action.state === "failed" ? "bad" : ""}>${action.state}</b> <span class="mono">${action.words}</span> ${action.state === "failed" ? action.error.message : last ? `${last.ref}: ${last.stage}` : ""}</p>`;
}
