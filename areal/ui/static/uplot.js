// uPlot as a module: its minified build is a script that declares one name.
const script = document.createElement("script");
script.src = "/static/vendor/uplot/uPlot.iife.min.js";
const loaded = new Promise((done, failed) => { script.onload = done; script.onerror = failed; });
document.head.append(script);
await loaded;
export default globalThis.uPlot;
