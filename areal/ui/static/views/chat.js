// `/chat`: one model, or two models or versions side by side; answers come token by token, coloured by log-probability.
import { html, useData, useEffect, useKeys, useRef, useState, callParts, Link, Loading, Problem, fmt, sessionsPath, setQuery } from "../ui.js";
import { Actions } from "../actions.js";
import { plural } from "../tokens.js";

export const title = () => "chat";

const idOf = (each) => `${each.service}/${each.model}${each.version === null ? "" : ` v${each.version}`}`;

export default function Chat({ route }) {
  const { data, error } = useData("chat", {});
  const { a, b, temperature = "1", top_p = "1", tokens = "", system = "", keep } = route.query;
  const [turns, setTurns] = useState([]); // { question, answers: { side: answer } }; an answer: { text, tokens, end?, error? }
  const field = useRef(null);
  const stop = useRef(null);
  const forget = () => { stop.current?.abort(); setTurns([]); };
  useEffect(() => () => stop.current?.abort(), []);
  useKeys([
    { key: "i", help: "write a message", run: () => field.current?.focus() },
    { key: "n", help: "a new conversation", run: forget },
    { key: "c", help: "stop the answer", run: () => stop.current?.abort() },
  ]);
  if (!data) return html`<h1>Chat</h1><${Loading} error=${error} />`;
  const choices = new Map(data.models.map((each) => [idOf(each), each]));
  const names = [...choices.keys()];
  const chosen = [choices.has(a) ? a : names[0], ...(choices.has(b) ? [b] : [])].filter(Boolean);
  const sides = chosen.map((id, side) => `${side + 1} ${id}`); // the same model twice is two samples
  const keeps = data.keeps && keep && chosen.every((id) => choices.get(id).version === null);
  const busy = turns.some((turn) => Object.values(turn.answers).some((each) => !each.end && !each.error));

  // What a side has answered so far. A new choice of models begins without the other's answers.
  const answered = (side) => turns.filter((turn) => turn.answers[side]?.end).map((turn) => [turn.question, turn.answers[side]]);
  function messagesFor(side, question) {
    const before = system ? [{ role: "system", content: system }] : [];
    return [...before, ...answered(side).flatMap(([asked, answer]) => [{ role: "user", content: asked }, { role: "assistant", content: answer.text }]), { role: "user", content: question }];
  }
  const sessionOf = (side) => answered(side).findLast(([, answer]) => answer.end.session)?.[1].end.session;

  async function ask(event) {
    event.preventDefault();
    const question = field.current.value.trim();
    if (!question || busy) return;
    field.current.value = "";
    const index = turns.length;
    const abort = (stop.current = new AbortController());
    const now = Object.fromEntries(sides.map((side) => [side, { text: "", tokens: [] }]));
    const show = () => setTurns((old) => (abort.signal.aborted && !old[index] ? old : [...old.slice(0, index), { question, answers: { ...now } }]));
    let drawn = 0;
    show();
    await Promise.all(sides.map(async (side) => {
      const body = { ...choices.get(side.slice(2)), messages: messagesFor(side, question), temperature: Number(temperature), topP: Number(top_p), maxTokens: tokens ? Number(tokens) : null, ...(keeps ? { keep: true, session: sessionOf(side) } : {}) };
      try {
        await callParts("chat", body, (part) => {
          const old = now[side];
          now[side] = "finishReason" in part ? { ...old, end: part } : { text: old.text + part.text, tokens: part.tokens.length ? [...old.tokens, ...part.tokens] : old.tokens };
          if (performance.now() - drawn > 40) { drawn = performance.now(); show(); }
        }, { signal: abort.signal });
      } catch (failure) {
        now[side] = { ...now[side], error: failure.name === "AbortError" ? { message: "stopped" } : failure };
      }
      show();
    }));
  }

  const sends = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event); };
  const pick = (name) => (event) => setQuery({ [name]: event.target.value });
  const number = (label, name, value, least, most, step) => html`<label>${label} <input type="number" min=${least} max=${most} step=${step} value=${value} onChange=${pick(name)} /></label>`;
  return html`
    <div class="head"><h1>Chat</h1><span class="facts"><span>${keeps ? "answers are recorded, a session a side" : "answers are not recorded"}</span></span></div>
    ${data.unseen.map((sentence) => html`<p class="warn" key=${sentence}>${sentence}</p>`)}
    ${!names.length ? html`<p class="empty">no model is served: areal get models</p>` : html`
    <div class="bar">
      <label>model <select value=${chosen[0]} onChange=${pick("a")}>${names.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
      <label>beside <select value=${chosen[1] ?? ""} onChange=${pick("b")}><option value="">none</option>${names.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
      ${number("temperature", "temperature", temperature, 0, 2, 0.1)} ${number("top-p", "top_p", top_p, 0, 1, 0.05)} ${number("max tokens", "tokens", tokens, 1, 4096, 1)}
      <label>system <input type="text" value=${system} onChange=${pick("system")} /></label>
      ${data.keeps && html`<label><input type="checkbox" checked=${Boolean(keep)} onChange=${(event) => setQuery({ keep: event.target.checked ? 1 : null })} /> keep as a session</label>`}
      <button type="button" onClick=${forget} disabled=${!turns.length}>New conversation</button>
    </div>
    ${data.keeps && keep && !keeps && html`<p class="warn">an answer of one version is not recorded: its session may be of another replica</p>`}
    ${turns.map((turn, at) => html`<section key=${at} class="panel turn"><pre class="pad question">${turn.question}</pre>
      <div class="answers">${Object.entries(turn.answers).map(([side, answer]) => html`<${Answer} key=${side} side=${side} answer=${answer} service=${choices.get(side.slice(2))?.service} last=${at === turns.length - 1} />`)}</div></section>`)}
    <form class="say" onSubmit=${ask}><textarea ref=${field} class="wide" rows="3" aria-label="Message" placeholder="a message; enter sends, shift+enter breaks the line  (i)" onKeyDown=${sends}></textarea>
      <div class="bar"><button type="submit" disabled=${busy}>Send</button>
        <button type="button" onClick=${() => stop.current?.abort()} disabled=${!busy}>Stop</button></div></form>`}`;
}

// Five steps from certain to improbable.
const step = (logprob) => (logprob > -0.1 ? 0 : logprob > -0.7 ? 1 : logprob > -1.6 ? 2 : logprob > -3 ? 3 : 4);

function Answer({ side, answer, service, last }) {
  const { end } = answer;
  const versions = [...new Set(answer.tokens.map((each) => each.version).filter((each) => each !== null))];
  const facts = [side.slice(2), ...(end ? [fmt.duration(end.seconds), end.firstSeconds !== null && `first token ${fmt.duration(end.firstSeconds)}`, plural(end.usage.completion_tokens ?? "?", "token"), end.finishReason] : []), versions.length > 0 && `version ${versions.join(", ")}`].filter(Boolean);
  const tell = (token) => [`probability ${(100 * Math.exp(token.logprob)).toPrecision(3)}%`, `logprob ${token.logprob.toFixed(3)}`, token.version !== null && `version ${token.version}`].filter(Boolean).join(", ");
  return html`<div class="pad"><p class="dim">${facts.join(", ")}</p>
    ${answer.tokens.length > 0 ? html`<pre class="answer">${answer.tokens.map((token, at) => html`<span key=${at} class=${`p${step(token.logprob)}`} title=${tell(token)}>${token.text}</span>`)}</pre>` : html`<pre>${answer.text}</pre>`}
    ${!end && !answer.error && html`<p role="status" class="dim">answering</p>`}
    ${answer.error && html`<${Problem} error=${answer.error} />`}
    ${end?.session && html`<p class="row"><${Link} href=${sessionsPath("inferenceservice", service, end.session)}>session ${end.session.length > 24 ? `${end.session.slice(0, 24)}…` : end.session}<//>
      ${last && html`<${Actions} target=${{ kind: "inferenceservice", name: service, session: end.session }} verbs=${["reward", "end-session"]} />`}</p>`}</div>`;
}
