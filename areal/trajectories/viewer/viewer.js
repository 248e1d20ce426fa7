"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const STEPS = [-0.1, -0.36, -0.7, -1.6, -3, -5];
  const SHARES = ["> 90 %", "> 70 %", "> 50 %", "> 20 %", "> 5 %", "> 0.7 %", "less"];
  const SPECIAL = /^<[|\uff5c].*[|\uff5c]>$/u;
  const state = { at: 0, paint: "logprob", find: "", sort: "order" };

  // Everything on the page is made here, and all text goes in as text: nothing of the data is ever parsed as markup.
  const make = (tag, options = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "class") node.className = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
    return node;
  };
  const drawn = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };
  const number = (value, digits = 3) => (value === null || value === undefined ? "–" : String(Number(value.toFixed(digits))));
  const grouped = (value) => value.toLocaleString("en");
  const plural = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;

  for (const [index, episode] of data.episodes.entries()) {
    const sampled = episode.turns.flatMap((turn) => turn.lp || []);
    episode.index = index;
    episode.generated = sampled.length;
    episode.mean = sampled.length ? sampled.reduce((sum, each) => sum + each, 0) / sampled.length : null;
    episode.versions = [...new Set(episode.turns.flatMap((turn) => turn.v || []))].sort((a, b) => a - b);
    episode.hint = Object.values(episode.example)[0] || firstText(episode.turns[0]);
    episode.haystack = [episode.name, ...episode.origin, ...Object.values(episode.example), ...episode.turns.map(wholeText)].join("\n").toLowerCase();
  }
  const versions = [...new Set(data.episodes.flatMap((episode) => episode.versions))].sort((a, b) => a - b);
  const rewards = data.episodes.map((each) => each.reward).filter((each) => each !== null);
  const low = Math.min(...rewards), high = Math.max(...rewards);

  function wholeText(turn) {
    return turn.messages ? turn.messages.map((each) => each[1]).join("\n") : turn.texts.join("");
  }
  function firstText(turn) {
    return turn ? wholeText(turn).slice(0, 120) : "";
  }
  function tone(reward) {
    if (reward === null || reward === undefined || low === high) return "";
    return reward >= low + (high - low) * 0.67 ? "good" : reward <= low + (high - low) * 0.33 ? "bad" : "";
  }
  function chip(reward, what = "") {
    const text = reward === null || reward === undefined ? "no reward" : `${what}${number(reward)}`;
    return make("span", { class: `chip ${tone(reward)}` }, text);
  }

  // -- the list

  const SORTS = {
    order: ["As recorded", (a, b) => a.index - b.index],
    best: ["Best first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.index - b.index],
    worst: ["Worst first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity) || a.index - b.index],
    long: ["Longest first", (a, b) => b.generated - a.generated],
    unsure: ["Least likely first", (a, b) => (a.mean ?? 0) - (b.mean ?? 0)],
  };
  const list = make("ul", { class: "list" });
  const pick = (index) => {
    state.at = index;
    fillList();
    fillMain();
    history.replaceState(null, "", `#${index}`);
  };
  function shown() {
    return data.episodes.filter((each) => each.haystack.includes(state.find)).sort(SORTS[state.sort][1]);
  }
  function fillList() {
    list.replaceChildren(
      ...shown().map((episode) =>
        make("li", {},
          make("button", { "aria-current": String(episode.index === state.at), onclick: () => pick(episode.index) },
            make("span", { class: "name" }, episode.name), chip(episode.reward),
            make("span", { class: "hint" }, episode.hint.replace(/\s+/g, " ").slice(0, 120) || plural(episode.turns.length, "turn")))))
    );
  }
  function spread() {
    if (rewards.length < 2 || low === high) return null;
    const bins = new Array(24).fill(0);
    for (const reward of rewards) bins[Math.min(23, Math.floor((24 * (reward - low)) / (high - low)))] += 1;
    const most = Math.max(...bins);
    const picture = drawn("svg", { viewBox: "0 0 240 44", preserveAspectRatio: "none", role: "img", "aria-label": "Rewards" });
    bins.forEach((count, place) => {
      const height = count ? Math.max(2, (42 * count) / most) : 0;
      picture.append(drawn("rect", { x: place * 10 + 1, y: 44 - height, width: 8, height, rx: 1.5 }));
    });
    return make("div", { class: "spread" }, picture,
      make("div", { class: "axis" }, make("span", {}, number(low)), make("span", {}, "reward"), make("span", {}, number(high))));
  }

  // -- one episode

  const main = make("main", { tabindex: "-1" });
  function fillMain() {
    const episode = data.episodes[state.at];
    if (!episode) return main.replaceChildren(make("p", { class: "quiet" }, "No trajectory here."));
    const count = episode.turns.reduce((sum, turn) => sum + new Set(turn.turns || [0]).size, 0);
    const facts = [...episode.origin, plural(count, "turn"), plural(episode.generated, "generated token")];
    if (episode.mean !== null) facts.push(`mean logprob ${number(episode.mean)}`);
    if (episode.versions.length) facts.push(`version ${episode.versions.join(", ")}`);
    if (episode.seconds) facts.push(`${number(episode.seconds, 2)} s`);
    if (episode.failures.length) facts.push(`failures: ${episode.failures.join(", ")}`);
    main.replaceChildren(
      make("div", { class: "head" }, make("h2", {}, episode.name), chip(episode.reward, "reward ")),
      make("p", { class: "sub" }, facts.join("  ·  ")),
      ...[exampleOf(episode), legend()].filter(Boolean),
      ...episode.turns.map(turnOf)
    );
    main.scrollTop = 0;
    return undefined;
  }
  function exampleOf(episode) {
    const fields = Object.entries(episode.example);
    if (!fields.length) return null;
    return make("details", { class: "example" }, make("summary", {}, `Example (${fields.map((each) => each[0]).join(", ")})`),
      make("dl", {}, fields.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
  }
  function legend() {
    if (state.paint === "logprob")
      return make("div", { class: "legend" }, "Probability of the sampled token",
        SHARES.map((share, place) => [make("i", { class: `p${place}` }), make("span", {}, share)]));
    if (state.paint === "version")
      return make("div", { class: "legend" }, "Weights that sampled the token",
        versions.map((version, place) => [make("i", { class: `v${place % 6}` }), make("span", {}, version)]));
    return null;
  }
  function turnOf(turn, place) {
    const sampled = turn.lp || [];
    const mean = sampled.length ? sampled.reduce((sum, each) => sum + each, 0) / sampled.length : null;
    const bar = make("div", { class: "bar" },
      make("span", { class: "number" }, `Turn ${turn.number}`),
      chip(turn.reward, "reward "),
      turn.advantage !== null ? make("span", { class: "chip" }, `advantage ${number(turn.advantage)}`) : null,
      turn.ret !== (turn.reward ?? 0) ? make("span", { class: "chip" }, `return ${number(turn.ret)}`) : null,
      make("span", {}, [turn.finish, turn.temperature ? `T ${turn.temperature}` : "", sampled.length ? plural(sampled.length, "token") : "", mean === null ? "" : `mean ${number(mean)}`]
        .filter(Boolean).join("  ·  ")),
      turn.truncated ? make("span", { class: "chip bad" }, "truncated") : null,
      make("span", { class: "grow" }), sampled.length > 2 ? spark(sampled) : null, make("span", { class: "id" }, turn.id));
    const box = make("section", { class: turn.depth ? "turn branch" : "turn", "data-turn": place }, bar);
    box.style.marginLeft = `${Math.min(turn.depth, 6) * 28}px`;
    if (turn.messages) box.append(...turn.messages.map(([role, text], at) => said(role, text, at === turn.messages.length - 1)));
    else {
      if (turn.before) box.append(make("div", { class: "before" }, `${plural(turn.before, "token")} as above`));
      box.append(...runs(turn));
    }
    return box;
  }
  function said(role, text, last) {
    return make("div", { class: last ? "run" : "run prompt" }, make("span", { class: "role" }, role), ...readable(text));
  }
  function spark(values) {
    const size = 130, step = Math.max(1, Math.floor(values.length / size));
    const points = [];
    for (let at = 0; at < values.length; at += step) points.push(Math.min(...values.slice(at, at + step)));
    const floor = Math.min(-1, ...points);
    const path = points.map((value, at) => `${at ? "L" : "M"}${((at * size) / Math.max(1, points.length - 1)).toFixed(1)},${(1 + (20 * value) / floor).toFixed(1)}`);
    const picture = drawn("svg", { class: "spark", viewBox: "0 0 130 22", preserveAspectRatio: "none", role: "img", "aria-label": "Log-probabilities" });
    picture.append(drawn("path", { d: path.join("") }));
    return picture;
  }
  function* stretches(mask) {
    for (let from = 0, to = 1; from < mask.length; from = to++) {
      while (to < mask.length && mask[to] === mask[from]) to += 1;
      yield [mask[from] === "1", from, to];
    }
  }
  function runs(turn) {
    let sampled = 0;
    return [...stretches(turn.mask)].map(([generated, from, to]) => {
      const box = make("div", { class: generated ? "run" : "run prompt" });
      if (generated && turn.turns) box.append(make("span", { class: "role" }, `turn ${turn.turns[sampled] + 1}`));
      for (let at = from; at < to; at += 1) box.append(tokenOf(turn, at, generated ? sampled++ : -1));
      return box;
    });
  }
  function tokenOf(turn, at, sampled) {
    const text = turn.texts[at];
    const node = document.createElement("span");
    node.className = `t ${paintOf(turn, sampled)}${text === null ? " raw" : text === "" ? " empty" : SPECIAL.test(text) ? " special" : ""}`;
    node.dataset.at = at;
    node.dataset.sampled = sampled;
    node.append(...(text === null ? [String(turn.ids[at])] : readable(text)));
    return node;
  }
  function paintOf(turn, sampled) {
    if (sampled < 0 || state.paint === "mask") return "";
    if (state.paint === "version") return `v${versions.indexOf(turn.v[sampled]) % 6}`;
    const step = STEPS.findIndex((least) => turn.lp[sampled] >= least);
    return `p${step < 0 ? STEPS.length : step}`;
  }
  // Line ends are seen and obeyed; what hides, reverses or rings is spelled.
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/u;
  function readable(text) {
    const nodes = [];
    for (const piece of text.split(/(\n|[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb])/u)) {
      if (piece === "\n") nodes.push(make("span", { class: "nl" }, "↵"), "\n");
      else if (HIDDEN.test(piece)) nodes.push(make("span", { class: "ctl" }, `\\u${piece.codePointAt(0).toString(16).padStart(4, "0")}`));
      else if (piece) nodes.push(piece);
    }
    return nodes;
  }

  // -- hovering

  const tip = make("div", { id: "tip", role: "tooltip" });
  let on = null;
  function tell(event) {
    const node = event.target.closest ? event.target.closest(".t") : null;
    if (node !== on) {
      if (on) on.classList.remove("on");
      on = node;
      tip.classList.toggle("show", Boolean(node));
      if (!node) return;
      node.classList.add("on");
      describe(node);
    }
    if (!on) return;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 20 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
  }
  function describe(node) {
    const turn = data.episodes[state.at].turns[Number(node.closest(".turn").dataset.turn)];
    const at = Number(node.dataset.at), sampled = Number(node.dataset.sampled);
    const rows = [["token", String(turn.ids[at])], ["position", grouped(turn.before + at)]];
    if (sampled >= 0) {
      const chance = 100 * Math.exp(turn.lp[sampled]);
      rows.push(["logprob", `${number(turn.lp[sampled], 4)}  (${chance >= 1 ? chance.toFixed(1) : chance.toPrecision(2)} %)`],
        ["version", String(turn.v[sampled])], ["turn reward", number(turn.reward)], ["return", number(turn.ret)]);
    } else rows.push(["mask", "prompt, not trained on"]);
    tip.replaceChildren(make("div", { class: "tok" }, turn.texts[at] === null ? "" : JSON.stringify(turn.texts[at])),
      make("table", {}, rows.map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", {}, value)))));
  }
  main.addEventListener("mousemove", tell);
  main.addEventListener("mouseleave", () => { if (on) on.classList.remove("on"); on = null; tip.classList.remove("show"); });

  // -- the page

  const asked = matchMedia("(prefers-color-scheme: dark)");
  let theme = null;
  const dress = () => { document.documentElement.dataset.theme = theme || (asked.matches ? "dark" : "light"); };
  asked.addEventListener("change", dress);
  dress();
  const paints = ["logprob", "version", "mask"].map((paint) =>
    make("button", { "aria-pressed": String(paint === state.paint), onclick: () => {
      state.paint = paint;
      paints.forEach((each) => each.setAttribute("aria-pressed", String(each.textContent.toLowerCase() === paint)));
      fillMain();
    } }, paint[0].toUpperCase() + paint.slice(1)));
  const facts = make("div", { class: "facts" },
    ...[[grouped(data.episodes.length), "episodes"],
      [grouped(data.episodes.reduce((sum, each) => sum + each.generated, 0)), "generated tokens"],
      rewards.length ? [number(rewards.reduce((sum, each) => sum + each, 0) / rewards.length), "mean reward"] : null]
      .filter(Boolean).map(([value, what]) => make("span", {}, make("b", {}, value), ` ${what}`)));
  document.title = data.title;
  document.getElementById("app").replaceChildren(
    make("header", {}, make("h1", { title: data.title }, data.title), facts, make("span", { class: "grow" }),
      data.decoded ? null : make("span", { class: "chip" }, "token ids: no tokenizer"),
      make("div", { class: "segment", role: "group", "aria-label": "Paint" }, paints),
      make("button", { class: "icon", title: "Light or dark", "aria-label": "Light or dark", onclick: () => {
        theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
        dress();
      } }, "◐")),
    make("aside", {},
      make("div", { class: "tools" },
        make("input", { type: "search", placeholder: "Find…", "aria-label": "Find", oninput: (event) => { state.find = event.target.value.toLowerCase(); fillList(); } }),
        make("select", { "aria-label": "Sort", onchange: (event) => { state.sort = event.target.value; fillList(); } },
          Object.entries(SORTS).map(([name, [text]]) => make("option", { value: name }, text)))),
      spread(), list),
    main);
  document.body.append(tip);
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select") || !["j", "k", "ArrowDown", "ArrowUp"].includes(event.key)) return;
    const order = shown().map((each) => each.index), place = order.indexOf(state.at);
    const next = order[place + (event.key === "j" || event.key === "ArrowDown" ? 1 : -1)];
    if (next !== undefined && (event.key === "j" || event.key === "k")) pick(next);
  });
  const wanted = Number(location.hash.slice(1));
  state.at = wanted >= 0 && wanted < data.episodes.length ? wanted : 0;
  fillList();
  fillMain();
})();
