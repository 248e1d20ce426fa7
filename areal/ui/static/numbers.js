// One form for each kind of number, the same as in the terminal (areal/numbers.py). Counts separate thousands here.

// A number as the server sends it: those that are not finite come as words.
export const num = (value) => (typeof value === "number" ? value : value === "NaN" ? NaN : value === "Infinity" ? Infinity : value === "-Infinity" ? -Infinity : null);

export function number(value) {
  const found = num(value);
  if (found === null) return "";
  if (!Number.isFinite(found)) return String(found);
  const size = Math.abs(found);
  if (Number.isInteger(found) && size < 1e15) return found.toLocaleString("en-US").replace(/^-0$/, "0");
  return size >= 1e6 || size < 1e-4 ? found.toExponential(2) : String(Number(found.toPrecision(4)));
}

export function duration(value) {
  if (value === null || value === undefined) return "";
  if (value >= 10) return age(value);
  const short = (part) => Number(part.toPrecision(3)), found = value < 1e-9 ? 0 : short(value);
  return found < 1e-3 ? `${short(found * 1e6)}us` : found < 1 ? `${short(found * 1e3)}ms` : `${found}s`;
}

export function age(value) {
  if (value === null || value === undefined) return "";
  const left = Math.max(0, Math.trunc(value));
  if (left < 120) return `${left}s`;
  const [big, small, size, part] = [["d", "h", 86400, 3600], ["h", "m", 3600, 60], ["m", "s", 60, 1]].find((units) => left >= units[2]);
  const count = Math.floor(left / size), rest = Math.floor((left % size) / part);
  return rest && count < 10 ? `${count}${big}${rest}${small}` : `${count}${big}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value, unit = 0;
  while (size >= 1023.5 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${size < 100 ? Number(size.toPrecision(3)) : Math.round(size)}${units[unit]}`;
}

// Where a log axis has its lines: 1, 2 and 5 in each power of ten, or whole powers where those are many; in a range without
// two of them, even steps. At most about ten. (uPlot's own loop has no end for a range that begins just below a power of ten.)
export function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.floor(Math.log10(high))], found = [];
  const digits = last - first > 2 ? [1] : [1, 2, 5], every = Math.ceil((last - first) / 8) || 1;
  for (let power = first; power <= last; power += every) found.push(...digits.map((each) => Number(`${each}e${power}`)));
  const inside = found.filter((each) => each >= low && each <= high);
  if (inside.length > 1) return inside;
  const step = Number(`1e${Math.floor(Math.log10(high - low))}`) / 2, from = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - from + 1 }, (_, at) => (from + at) * step).filter((_, at, all) => all.length < 8 || at % 4 === 0);
}
