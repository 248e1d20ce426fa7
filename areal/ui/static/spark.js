// A small line of a process's last minutes, as SVG. The number stands beside it, so that it is hidden from readers.
import { html } from "./ui.js";

export function Spark({ at, values, width = 90, height = 18, least = 0 }) {
  if (!values || values.length < 2) return null;
  const end = at[at.length - 1], start = Math.min(at[0], end - 60);
  const top = Math.max(least, ...values.map((value) => value ?? 0)) || 1;
  const x = (index) => ((at[index] - start) / (end - start || 1)) * (width - 2) + 1;
  const y = (value) => height - 2 - (value / top) * (height - 4);
  let path = "", pen = false;
  values.forEach((value, index) => {
    if (value === null) { pen = false; return; }
    path += `${pen ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return html`<svg class="spark" width=${width} height=${height} aria-hidden="true"><path d=${path} fill="none" stroke="currentColor" stroke-width="1.2" /></svg>`;
}
