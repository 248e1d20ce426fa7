// `/chat`: one model, or two side by side; answers coloured by the log-probability of each token.
import { html, useData, useKeys, useRef, useState, call, Loading, Problem, fmt, setQuery } from "../ui.js";

export const title = () => "chat";

const idOf = (each) => `${each.service}/${each.model}`;

export default function Chat({ route }) {
  const { data, error } = useData("chat", {});
  const { a, b, temperature = "1", top_p = "1", tokens = "", system = "" } = route.query;
  const [turns, setTurns] = useState([]); // { question, answers: { id: { data } | { error } | null } }
  const field = useRef(null);
  useKeys([
    { key: "i", help: "write a message", run: () => field.current?.focus() },
    { key: "n", help: "a new conversation", run: () => setTurns([]) },
  ]);
  if (!data) return html`<h1>Chat</h1><${Loading} error=${error} />`;
  const names = data.models.map(idOf);
  const chosen = [names.includes(a) ? a : names[0], ...(names.includes(b) ? [b] : [])].filter(Boolean);
  const sides = chosen.map((id, side) => `${side + 1} ${id}`); // the same model twice is two samples
  const busy = turns.some((turn) => Object.values(turn.answers).includes(null));

  function messagesFor(side, question) {
    const told = system ? [{ role: "system", content: system }] : [];
    const past = turns.filter((turn) => turn.answers[side]?.data).flatMap((turn) => [{ role: "user", content: turn.question }, { role: "assistant", content: turn.answers[side].data.text }]);
    return [...told, ...past, { role: "user", content: question }];
  }

  async function ask(event) {
    event.preventDefault();
    const question = field.current.value.trim();
    if (!question || busy) return;
    field.current.value = "";
    const index = turns.length;
    setTurns([...turns, { question, answers: Object.fromEntries(sides.map((side) => [side, null])) }]);
    await Promise.all(sides.map(async (side) => {
      const model = data.models.find((each) => idOf(each) === side.slice(2));
      let answer;
      try {
        answer = { data: (await call("chat", {}, { body: { ...model, messages: messagesFor(side, question), temperature: Number(temperature), topP: Number(top_p), maxTokens: tokens ? Number(tokens) : null } })).data };
      } catch (failure) { answer = { error: failure }; }
      setTurns((now) => now.map((turn, at) => (at === index ? { ...turn, answers: { ...turn.answers, [side]: answer } } : turn)));
    }));
  }

  const sends = (event) => { if (event.key === "Enter" && !event.shiftKey) ask(event); };
  const pick = (name) => (event) => setQuery({ [name]: event.target.value });
  const number = (label, name, value, least, most, step) => html`<label>${label} <input type="number" min=${least} max=${most} step=${step} value=${value} onChange=${pick(name)} /></label>`;
  return html`
    <div class="head"><h1>Chat</h1><span class="facts"><span>answers are whole, and not recorded</span></span></div>
    ${data.unseen.map((sentence) => html`<p class="warn" key=${sentence}>${sentence}</p>`)}
    ${!names.length ? html`<p class="empty">no model is served: areal get models</p>` : html`
    <div class="bar">
      <label>model <select value=${chosen[0]} onChange=${pick("a")}>${names.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
      <label>beside <select value=${chosen[1] ?? ""} onChange=${pick("b")}><option value="">none</option>${names.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
      ${number("temperature", "temperature", temperature, 0, 2, 0.1)} ${number("top-p", "top_p", top_p, 0, 1, 0.05)} ${number("tokens", "tokens", tokens, 1, 4096, 1)}
      <label>system <input type="text" value=${system} onChange=${pick("system")} /></label>
      <button type="button" onClick=${() => setTurns([])} disabled=${!turns.length}>New conversation</button>
    </div>
    ${turns.map((turn, at) => html`<section key=${at} class="panel turn"><pre class="pad question">${turn.question}</pre>
      <div class="answers">${Object.entries(turn.answers).map(([side, answer]) => html`<div key=${side} class="pad"><p class="dim">${side.slice(2)}${answer?.data ? `, ${fmt.seconds(answer.data.seconds)}, ${answer.data.usage.completion_tokens ?? "?"} tokens, ${answer.data.finishReason}` : ""}</p>
        ${answer === null ? html`<p role="status" class="dim">answering</p>` : answer.error ? html`<${Problem} error=${answer.error} />` : html`<${Answer} data=${answer.data} />`}</div>`)}</div></section>`)}
    <form class="say" onSubmit=${ask}><textarea ref=${field} class="wide" rows="3" aria-label="Message" placeholder="a message; enter sends, shift+enter breaks the line  (i)" onKeyDown=${sends}></textarea>
      <div class="bar"><button type="submit" disabled=${busy}>Send</button></div></form>`}`;
}

// Five steps from certain to improbable.
const step = (logprob) => (logprob > -0.1 ? 0 : logprob > -0.7 ? 1 : logprob > -1.6 ? 2 : logprob > -3 ? 3 : 4);

function Answer({ data }) {
  if (!data.tokens.length) return html`<pre>${data.text}</pre>`;
  return html`<pre class="answer">${data.tokens.map((token, at) => html`<span key=${at} class=${`p${step(token.logprob)}`} title=${`probability ${(100 * Math.exp(token.logprob)).toPrecision(3)} %, logprob ${token.logprob.toFixed(3)}`}>${token.text}</span>`)}</pre>`;
}
