// Draws the charts of the last minutes: one per quantity, with gaps where values are missing.  By uPlot (MIT, see uplot/LICENSE).
/* global uPlot */

import { bytes, el, number, patch, percent, rate, seconds } from "./draw.js";

const LINES = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#f0e442", "#999999"];
const LIGHT = { "#f0e442": "#8a7d00", "#56b4e9": "#1b7fb8", "#e69f00": "#a86f00" }; // for contrast on white
const SERIES_MAX = 16;
const HEIGHT = 170;
const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power); // round numbers of bytes

const CHARTS = [
  { key: "cpu", title: "Processors in use", metric: "pacecar_host_cpu_utilization_ratio", write: percent, from: 0, to: 1.02 },
  { key: "memory", title: "Host memory in use", metric: "pacecar_host_memory_used_bytes", write: bytes, from: 0 },
  { key: "pace", title: "Step of each job, slowest rank", metric: "pacecar_job_pace_seconds", write: seconds, from: 0 },
  { key: "gpu", title: "GPU utilization", metric: "pacecar_gpu_utilization_ratio", write: percent, from: 0, to: 1.02 },
  { key: "power", title: "GPU power", metric: "pacecar_gpu_power_watts", write: (v) => `${number(v)} W`, from: 0 },
  { key: "gpumemory", title: "GPU memory in use", metric: "pacecar_gpu_memory_used_bytes", write: bytes, from: 0 },
  { key: "temperature", title: "GPU temperature", metric: "pacecar_gpu_temperature_celsius", write: (v) => `${number(v)} \u00B0C` },
  { key: "receive", title: "Received by links", metric: "_receive_bytes_per_second", write: rate, from: 0 },
  { key: "transmit", title: "Sent by links", metric: "_transmit_bytes_per_second", write: rate, from: 0 },
];

const drawn = new Map();

function labelOf(series) {
  const short = series.replace(/launch="([0-9a-f]{4})[0-9a-f]*"/, 'launch="$1"'); // tells jobs of one name apart
  const values = [...short.matchAll(/="((?:[^"\\]|\\.)*)"/g)].map((found) => found[1].replaceAll('\\"', '"').replaceAll("\\\\", "\\"));
  return (series.includes("{gpu=") ? "GPU " : "") + values.join(" ") || "node";
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const isLight = style.colorScheme.includes("light");
  return { text: style.getPropertyValue("--soft").trim(), grid: style.getPropertyValue("--track").trim(), line: (n) => (isLight && LIGHT[LINES[n % 8]]) || LINES[n % 8] };
}

function make(host, chart, names, width) {
  const { text, grid, line } = colours();
  const write = (value) => (value === null || value === undefined ? "\u2013" : chart.write(value));
  const clock = (_, ticks, __, ___, step) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined, hour12: false }));
  const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
  return new uPlot({
    width, height: HEIGHT,
    cursor: { y: false, sync: { key: "pacecar" } },
    legend: { live: true },
    scales: { y: { range: (_, low, high) => [chart.from ?? Math.floor(low ?? 0), chart.to ?? Math.max((high ?? 0) * 1.1, 1e-9)] } },
    axes: [{ ...axis, space: 80, values: clock }, { ...axis, size: 70, incrs: chart.write === bytes ? POWERS : undefined, values: (_, ticks) => ticks.map(write) }],
    series: [{ label: "time", value: (_, at) => (at === null ? "\u2013" : new Date(at * 1000).toLocaleTimeString([], { hour12: false })) },
      ...names.map((name, n) => ({ label: labelOf(name), stroke: line(n), width: 1.5, dash: n >= 8 ? [5, 3] : undefined, points: { show: false }, value: (_, v) => write(v) }))],
  }, [[], ...names.map(() => [])], host);
}

function summary(chart, names, history, from) {
  const parts = names.map((name) => {
    const values = history.series.get(name).slice(from).filter((value) => value !== null);
    if (!values.length) return `${labelOf(name)}: nothing read`;
    return `${labelOf(name)}: now ${chart.write(values.at(-1))}, lowest ${chart.write(Math.min(...values))}, highest ${chart.write(Math.max(...values))}`;
  });
  return parts.join("; ");
}

export function forgetColours() { for (const one of drawn.values()) { one.plot.destroy(); } drawn.clear(); }

export function drawCharts(root, history, span) {
  const end = history.times.at(-1);
  if (end === undefined) { patch(root, [el("p", { class: "none" }, "No tick yet.")]); return; }
  let from = history.times.findIndex((time) => time >= end - span);
  if (from < 0) from = 0;
  const wanted = CHARTS.map((chart) => ({ chart, all: [...history.series.keys()].filter((name) => (chart.metric.startsWith("_") ? name.split("{")[0].endsWith(chart.metric) : name.split("{")[0] === chart.metric)) }))
    .filter(({ all }) => all.length);
  for (const key of [...drawn.keys()]) if (!wanted.some(({ chart }) => chart.key === key)) { drawn.get(key).figure.remove(); drawn.get(key).plot.destroy(); drawn.delete(key); }
  for (const child of [...root.children]) if (child.localName === "p") child.remove();
  for (const { chart, all } of wanted) {
    const names = all.slice(0, SERIES_MAX);
    const figure = root.querySelector(`[data-chart="${chart.key}"]`) || frame(root, chart);
    const host = figure.querySelector("div");
    const width = Math.max(200, Math.floor(host.clientWidth));
    let one = drawn.get(chart.key);
    if (!one || one.names.join("\n") !== names.join("\n")) {
      if (one) one.plot.destroy();
      one = { plot: make(host, chart, names, width), names, figure };
      drawn.set(chart.key, one);
    } else if (one.plot.width !== width) one.plot.setSize({ width, height: HEIGHT });
    one.plot.setData([history.times.slice(from), ...names.map((name) => history.series.get(name).slice(from))]);
    if (one.plot.cursor.left < 0) one.plot.setLegend({ idx: history.times.length - from - 1 }, false); // without a pointer, the latest
    const more = all.length > names.length ? ` (${all.length - names.length} more in metrics)` : "";
    figure.querySelector("figcaption span").textContent = more;
    figure.querySelector("p").textContent = summary(chart, names, history, from);
  }
}

function frame(root, chart) {
  const figure = document.createElement("figure");
  figure.dataset.chart = chart.key;
  const caption = document.createElement("figcaption");
  caption.append(chart.title, document.createElement("span"));
  const host = document.createElement("div");
  host.setAttribute("aria-hidden", "true"); // screen readers get the sentence below instead of the canvas
  const words = document.createElement("p");
  words.className = "quiet";
  figure.append(caption, host, words);
  root.append(figure);
  return figure;
}
