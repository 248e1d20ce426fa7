// Curves over steps by uPlot: one cursor for all charts of a page, moved by the mouse or by arrows; smoothing; a log axis;
// outliers clipped, so that one spike does not flatten a curve.
import uPlot from "./uplot.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, Filter, Toggle, flip, fmt, setQuery } from "./ui.js";
import { logTicks } from "./numbers.js";

const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"];
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
export const colourOf = (at) => `var(${COLOURS[at % COLOURS.length]})`;
const resolved = (name, element) => {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};
const faint = (colour, share) => colour.replace(/^rgb\(([^)]+)\)$/, (_, rgb) => `rgba(${rgb}, ${share})`);

const FEW = 30; // points: each is drawn, and none is smoothed
const isFew = (values) => values.filter((value) => value !== null).length < FEW;

// An exponential mean over buckets, without a bias at the beginning; gaps stay gaps. A few evaluations are left as they are.
export function smoothed(values, weight) {
  if (!weight || isFew(values)) return values;
  let last = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + (1 - weight) * value;
    norm = norm * weight + (1 - weight);
    return last / norm;
  });
}

// As `drawn_range` of areal/ui/curves.py: the range without the few that lie far outside of all others.
export function drawnRange(values) {
  const known = values.filter((each) => each !== null && Number.isFinite(each)).sort((a, b) => a - b);
  if (!known.length) return [0, 1];
  const few = known.length >= 8 ? Math.ceil(known.length * 0.02) : 0;
  const low = known[few], high = known[known.length - 1 - few], room = high - low;
  if (low === high) return [known[0], known[known.length - 1]];
  return [known.find((each) => each >= low - room), known.findLast((each) => each <= high + room)];
}

// What is outside of the drawn range.
export function outliers(series) {
  const values = series.flatMap(({ points: { mean, low, high } }) => (low ? [...low, ...high] : mean)).filter((each) => each !== null && Number.isFinite(each));
  const [from, to] = drawnRange(values), [least, most] = values.reduce(([a, b], each) => [Math.min(a, each), Math.max(b, each)], [from, to]);
  return [most > to && `up to ${fmt.number(most)}`, least < from && `down to ${fmt.number(least)}`].filter(Boolean).map((each) => `${each}, clipped`).join("; ");
}

// series: [{ name, points: {mean, low, high}, starts?, colour?: index, notFinite?: first step of a NaN }] over `starts`. cursor: { at: step|null, set(step), listeners }.
export function Chart({ title, starts, series, smooth = 0, log = false, clip = true, cursor, onOpen, height = 150, stacked = false, unit = "" }) {
  const host = useRef(null);
  const plot = useRef(null);
  const readout = useRef(null);
  const key = JSON.stringify([beside(starts.at(-1)), series.map((each) => [each.name, isFew(each.points.mean)]), smooth, log, clip, stacked, height]);
  const shown = useRef(null);
  shown.current = { starts, series, smooth, log, clip, stacked, onOpen };
  const form = (value) => (stacked && value !== null ? `${Math.round(100 * value)}%` : fmt.number(value));
  const write = (at) => {
    const index = at === null || at === undefined ? null : nearest(shown.current.starts, at);
    readout.current?.querySelectorAll("[data-series]").forEach((node, place) => {
      const values = shown.current.series[place]?.points.mean ?? [];
      node.textContent = form(index === null ? lastOf(values) : values[index] ?? null) || "–";
    });
  };
  useLayoutEffect(() => {
    const dress = () => {
      plot.current?.destroy();
      plot.current = draw(host.current, shown, cursor, height);
      place(plot.current, shown.current.starts, cursor.at);
    };
    dress();
    const size = new ResizeObserver(() => plot.current?.setSize({ width: host.current.clientWidth, height }));
    size.observe(host.current);
    const theme = new MutationObserver(dress);
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", dress);
    return () => { size.disconnect(); theme.disconnect(); media.removeEventListener("change", dress); plot.current?.destroy(); plot.current = null; };
  }, [key]);
  useEffect(() => { plot.current?.setData(dataOf(shown.current)); place(plot.current, starts, cursor.at); }, [starts, series]);
  useLayoutEffect(() => write(cursor.at)); // these texts are not Preact's: the cursor moves without a render
  useEffect(() => {
    const move = (at) => { place(plot.current, shown.current.starts, at); write(at); };
    cursor.listeners.add(move);
    return () => cursor.listeners.delete(move);
  }, [cursor]);
  const beyond = useMemo(() => (clip && !stacked ? outliers(series) : ""), [series, clip, stacked]);
  const words = series.map((each) => `${each.name} ${form(lastOf(each.points.mean))}`).join(", ");
  return html`<figure class="chart" role="group" aria-label=${`${title}: ${words}`}>
    <figcaption ref=${readout}><b>${title}</b>${unit && html` <span class="dim">${unit}</span>`}
      ${series.map((each, at) => html`<span class="key" key=${each.name}><i style=${{ background: stacked ? undefined : colourOf(each.colour ?? at), borderColor: colourOf(each.colour ?? at), backgroundColor: colourOf(each.colour ?? at) }} data-dash=${each.dash ?? 0}></i>${series.length > 1 || each.label ? `${each.label ?? each.name} ` : ""}<span class="num" data-series=${at}></span></span>`)}
      ${series.filter((each) => each.notFinite !== undefined).map((each) => html`<span class="warn" key=${`${each.name} NaN`}>${series.length > 1 ? `${each.name} ` : ""}NaN or infinite, first at step ${fmt.number(each.notFinite)}</span>`)}
      ${beyond && html`<span class="dim" title="c shows them">${beyond}</span>`}
    </figcaption>
    <div ref=${host} style=${{ height: `${height}px` }}></div>
  </figure>`;
}

const lastOf = (values) => { for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at]; return null; };

export function nearest(starts, step) {
  let low = 0, high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= step) low = middle; else high = middle - 1;
  }
  return low;
}

function place(plot, starts, at) {
  if (!plot || !starts.length) return;
  if (at === null || at === undefined) { plot.setCursor({ left: -10, top: -10 }, false); return; }
  plot.setCursor({ left: plot.valToPos(starts[nearest(starts, at)], "x"), top: 10 }, false);
}

// Columns of uPlot: with bands, a mean with its lowest and highest value; stacked, running sums of shares.
function dataOf({ starts, series, smooth, log, stacked }) {
  if (stacked) {
    const sums = starts.map(() => 0);
    return [starts, ...series.map((each) => each.points.mean.map((value, at) => (sums[at] += value ?? 0)))];
  }
  const positive = (values) => (log ? values.map((value) => (value !== null && value > 0 ? value : null)) : values);
  return [starts, ...series.flatMap((each) => {
    const { mean, low, high } = each.points;
    return [positive(low ?? mean), positive(high ?? mean), positive(smoothed(mean, smooth))];
  })];
}

function draw(host, shown, cursor, height) {
  const { starts, series, log, clip, stacked } = shown.current;
  const ink = resolved("--dim", host), line = resolved("--line", host);
  const plain = { points: { show: false } };
  const columns = [{}], bands = [];
  series.forEach((each, at) => {
    const colour = resolved(COLOURS[(each.colour ?? at) % COLOURS.length], host);
    if (stacked) {
      columns.push({ ...plain, stroke: colour, width: 1, fill: at === 0 ? faint(colour, 0.75) : undefined });
      if (at) bands.push({ series: [at + 1, at], fill: faint(colour, 0.75) });
      return;
    }
    const few = isFew(each.points.mean);
    columns.push({ ...plain, stroke: faint(colour, 0.18), width: 1, spanGaps: true }, { ...plain, stroke: faint(colour, 0.18), width: 1, spanGaps: true },
      { stroke: colour, width: 1.5, spanGaps: true, dash: DASHES[(each.dash ?? 0) % DASHES.length], points: { show: few, size: 4, fill: colour } });
    bands.push({ series: [3 * at + 2, 3 * at + 1], fill: faint(colour, 0.16) });
  });
  const range = (u, least, most) => {
    if (stacked) return [0, 1];
    const values = u.data.slice(1).filter((_, at) => at % 3 !== 2).flat(); // as they are: smoothed, a spike has a long tail
    let [low, high] = clip ? drawnRange(values) : [least, most];
    if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [0, 1];
    if (log) { const known = values.filter((value) => value > 0); const least = known.reduce((a, b) => Math.min(a, b), Infinity); return Number.isFinite(least) ? [Math.max(low, least) / 1.2 || least, Math.max(high, least) * 1.2] : [0.1, 1]; }
    if (low === high) { const room = Math.abs(low) * 0.1 || 0.5; return [low - room, high + room]; }
    const room = (high - low) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  };
  const axis = { stroke: ink, font: "11px ui-sans-serif, system-ui, sans-serif", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const plot = new uPlot({
    width: host.clientWidth || 300, height, legend: { show: false }, padding: [6, beside(shown.current.starts.at(-1)), 0, 0], bands,
    cursor: { y: false, points: { size: 6, show: stacked ? false : undefined }, drag: { x: false, y: false } },
    scales: { x: { time: false }, y: { range, distr: log && !stacked ? 3 : 1, log: 10 } },
    axes: [{ ...axis, size: 22, space: 60 }, { ...axis, ...(log && !stacked && { splits: (u, at, low, high) => logTicks(low, high), filter: (u, splits) => splits }), size: (u, values) => Math.max(48, 14 + 6.5 * Math.max(0, ...(values ?? []).map((each) => each.length))), space: 26, values: (u, values) => values.map((value) => (value === null ? "" : stacked ? `${Math.round(100 * value)}%` : compact(value))) }],
    series: columns,
  }, dataOf(shown.current), host);
  plot.over.addEventListener("mousemove", () => { if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) cursor.set(shown.current.starts[plot.cursor.idx]); });
  plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) shown.current.onOpen?.(shown.current.starts[plot.cursor.idx]); });
  return plot;
}

// Right of a chart, for half of the last step's label below it.
const beside = (last) => Math.max(8, Math.ceil(3.2 * (String(last ?? 0).length + 1)));

function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(0);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(3)));
}

// The keys and the bar that every page of curves has. `query`: of the address; `starts`: the steps that the cursor moves over.
export const SMOOTH = { none: 0, some: 0.6, much: 0.9 };

export function curveKeys({ smooth = "none", log, all }, cursor, starts) {
  const move = (by) => {
    const last = starts.length - 1;
    if (last >= 0) cursor.set(starts[Math.max(0, Math.min(last, cursor.at === null ? last : nearest(starts, cursor.at) + by))]);
  };
  const names = Object.keys(SMOOTH), next = names[(names.indexOf(smooth) + 1) % names.length];
  return [
    { key: "ArrowRight", help: "next step", run: (event) => move(event.shiftKey ? 10 : 1) },
    { key: "ArrowLeft", help: "previous step (with shift: ten)", run: (event) => move(event.shiftKey ? -10 : -1) },
    { key: "s", help: "smoothing: none, some, much", run: () => setQuery({ smooth: next === "none" ? null : next }) },
    { key: "l", help: "logarithmic axis", run: flip("log", log) },
    { key: "m", help: "all metrics", run: flip("all", all) },
  ];
}

export function CurveBar({ query: { q, smooth = "none", log, all }, filters, children }) {
  return html`<div class="bar">
    <${Filter} value=${q} label=${`Filter ${filters}`} placeholder=${`filter ${filters}`} />
    <label class="row">smoothing <select onChange=${(event) => setQuery({ smooth: event.target.value === "none" ? null : event.target.value })}>${Object.keys(SMOOTH).map((each) => html`<option key=${each} selected=${each === smooth}>${each}</option>`)}</select></label>
    <${Toggle} name="log" on=${log}>log axis<//> <${Toggle} name="all" on=${all}>all metrics<//> ${children}
  </div>`;
}

// One cursor of a page: the step that all charts show.
export function useCursor(initial) {
  const held = useRef(null);
  held.current ??= { at: initial ?? null, listeners: new Set(), set(at) { if (at === this.at) return; this.at = at; this.listeners.forEach((run) => run(at)); } };
  return held.current;
}
