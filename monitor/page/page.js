// Draws the daemon's status document, which arrives once a tick as a server-sent event; see docs/snapshot.md.

import { bytes, el, meter, number, patch, percent, rate, scaled, seconds, table, words } from "./draw.js";
import { drawCharts, forgetColours } from "./charts.js";

const VERSION = 1;
const POINTS_MAX = 600;
const STALE_PERIODS = 4;
const HEADINGS = ["compute", "exposed_communication", "exposed_copy", "data_wait", "host_bound", "optimizer_host", "checkpoint", "stopped", "unknown"];

const $ = (id) => document.getElementById(id);
const history = { times: [], series: new Map() };
const sorting = {};
let latest = null;
let receivedAt = null;
let isPaused = false;

// --- the stream

function listen() {
  const source = new EventSource("api/events");
  source.addEventListener("open", fill);
  source.addEventListener("snapshot", (event) => receive(JSON.parse(event.data)));
  source.addEventListener("point", (event) => { const [time, values] = JSON.parse(event.data); append(time, values); });
  source.addEventListener("error", () => {
    showState("lost", "connection lost, trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000); // refused: too many viewers, or the daemon is starting
  });
}

async function fill() {
  try {
    const answer = await fetch("api/history");
    const received = await answer.json();
    if (received.version !== VERSION) return;
    history.times = received.time_seconds;
    history.series = new Map(Object.entries(received.series));
    render();
  } catch { /* the stream reports a lost connection */ }
}

function append(time, values) {
  if (history.times.length && time <= history.times.at(-1)) return;
  history.times.push(time);
  for (const name of Object.keys(values)) if (!history.series.has(name)) history.series.set(name, Array(history.times.length - 1).fill(null));
  for (const [name, ring] of history.series) ring.push(values[name] ?? null);
  if (history.times.length > POINTS_MAX) {
    history.times.shift();
    for (const [name, ring] of history.series) { ring.shift(); if (ring.every((value) => value === null)) history.series.delete(name); }
  }
  if (!isPaused) drawCharts($("charts"), history, Number($("span").value));
}

function receive(status) {
  if (status.version !== VERSION) { showState("stale", `the daemon sends version ${status.version}, this page needs ${VERSION}: reload the page`); return; }
  latest = status;
  receivedAt = performance.now();
  if (!isPaused) render();
  updateState();
}

function showState(kind, text) { // only changes, because screen readers read them out
  const place = $("state");
  if (place.dataset.state !== kind) place.dataset.state = kind;
  if (place.textContent !== text) place.textContent = text;
}

function updateState() {
  if (!latest) return;
  const limit = STALE_PERIODS * Math.max(1, latest.daemon.period_seconds);
  if ((performance.now() - receivedAt) / 1000 > limit) showState("stale", "no news from the daemon");
  else if (latest.snapshot_age_seconds !== null && latest.snapshot_age_seconds > limit) showState("stale", "the daemon does not tick");
  else showState(isPaused ? "paused" : "live", isPaused ? "paused" : "live");
}

// --- drawing

function render() {
  if (!latest) return;
  patch($("node"), [latest.node]);
  if (document.title !== `pacecar ${latest.node}`) document.title = `pacecar ${latest.node}`;
  patch($("host"), drawHost(latest.host));
  patch($("gpu-alarms"), gpuAlarms(latest));
  patch($("gpus"), drawGpus(latest.gpus));
  patch($("instances"), drawInstances(latest.gpus));
  patch($("joblist"), drawJobs(latest));
  patch($("links"), drawLinks(latest.links));
  patch($("daemon"), drawDaemon(latest));
  drawCharts($("charts"), history, Number($("span").value));
}

// Makes wide content scroll, with the keyboard too.
function scrolling(name, inside) { return el("div", { class: "wide", tabindex: 0, role: "group", "aria-label": name }, inside); }

function ratioOf(part, whole) { return part === null || !whole ? null : part / whole; }

function tile(name, value, ratio) {
  return el("div", { class: "tile", key: name }, el("div", { class: "name" }, name), el("div", { class: "value" }, value), meter(ratio));
}

function drawHost(host) {
  const swap = host.swap_size_bytes ? tile("Swap", `${bytes(host.swap_used_bytes)} of ${bytes(host.swap_size_bytes)}`, ratioOf(host.swap_used_bytes, host.swap_size_bytes)) : null;
  return [
    tile(`Processors (${number(host.cpus_online)})`, percent(host.cpu_utilization_ratio), host.cpu_utilization_ratio),
    tile("Memory", `${bytes(host.memory_used_bytes)} of ${bytes(host.memory_size_bytes)}`, ratioOf(host.memory_used_bytes, host.memory_size_bytes)),
    tile("Page cache", bytes(host.memory_cached_bytes), ratioOf(host.memory_cached_bytes, host.memory_size_bytes)),
    swap,
    tile("Tasks runnable, blocked", `${number(host.tasks_runnable)}, ${number(host.tasks_blocked)}`, null),
  ].filter(Boolean);
}

const GPU_COLUMNS = [
  { title: "GPU", head: true, text: true, sort: (g) => Number(g.gpu), cell: (g) => `${g.gpu} ${g.name ?? ""}` },
  { title: "State", text: true, cell: gpuState },
  { title: "Utilization", sort: (g) => g.utilization_ratio, cell: (g) => [meter(g.utilization_ratio), percent(g.utilization_ratio)] },
  { title: "SM active", of: ["sm_active_ratio"], sort: (g) => g.sm_active_ratio, cell: (g) => percent(g.sm_active_ratio) },
  { title: "Tensor", of: ["tensor_active_ratio"], sort: (g) => g.tensor_active_ratio, cell: (g) => percent(g.tensor_active_ratio) },
  { title: "Memory", sort: (g) => g.memory_used_bytes, cell: (g) => [meter(ratioOf(g.memory_used_bytes, g.memory_size_bytes)), `${bytes(g.memory_used_bytes)} of ${bytes(g.memory_size_bytes)}`] },
  { title: "Power", sort: (g) => g.power_watts, cell: (g) => `${number(g.power_watts)} of ${number(g.power_limit_watts)} W` },
  { title: "Temperature", sort: (g) => g.temperature_celsius, cell: (g) => (g.temperature_celsius === null ? "\u2013" : `${number(g.temperature_celsius)} \u00B0C`) },
  { title: "SM clock", sort: (g) => g.sm_clock_hertz, cell: (g) => scaled(g.sm_clock_hertz, "Hz") },
  { title: "NVLink in, out", of: ["nvlink_receive_bytes_per_second", "nvlink_transmit_bytes_per_second"], cell: (g) => `${rate(g.nvlink_receive_bytes_per_second)}, ${rate(g.nvlink_transmit_bytes_per_second)}` },
  { title: "PCIe in, out", of: ["pcie_receive_bytes_per_second", "pcie_transmit_bytes_per_second"], cell: (g) => `${rate(g.pcie_receive_bytes_per_second)}, ${rate(g.pcie_transmit_bytes_per_second)}` },
];

function gpuState(gpu) { // the verdict first; the alarms above the table give the reason and the remedy
  const reasons = gpu.health_reasons.map(({ reason }) => (reason === "down" ? `down (${words(gpu.down_reason)})` : words(reason)));
  const wrong = [...(reasons.length ? [`${gpu.health}: ${reasons.join(", ")}`] : []), ...(gpu.throttled_by ?? []).map((reason) => `throttled: ${words(reason)}`)];
  if (gpu.up === 0 && !reasons.length) wrong.push(gpu.down_reason === null ? "not read yet" : `down: ${words(gpu.down_reason)}`);
  const more = [gpu.xid_errors_total ? `, ${gpu.xid_errors_total} Xid` : "", gpu.mig_enabled ? ", MIG" : "", gpu.mps_processes ? `, MPS: ${number(gpu.mps_processes)} ${gpu.mps_processes === 1 ? "client" : "clients"}` : ""].join("");
  return [wrong.length ? el("span", { class: "bad" }, wrong.join(", ")) : "ok", more];
}

function gpuAlarms(status) {
  const same = new Map(); // one alarm for several GPUs with the same fault
  for (const gpu of status.gpus) {
    for (const one of gpu.health_reasons) {
      const text = `${one.verdict}: ${one.words}.`;
      if (!same.has(text)) same.set(text, { ...one, text, gpus: [] });
      same.get(text).gpus.push(gpu);
    }
  }
  const broken = [...same.values()].sort((a, b) => (a.verdict !== "failed") - (b.verdict !== "failed"));
  return [
    ...broken.map((one) => el("p", { class: one.verdict === "failed" ? "alarm" : "alarm mild", key: one.text },
      el("strong", {}, `GPU ${one.gpus.map((gpu) => gpu.gpu).join(", ")} ${one.text}`), ` To do: ${one.remedy}. `,
      el("span", { class: "none" }, one.gpus.length === 1 ? identityOf(one.gpus[0]) : ""))),
    ...status.gpus_missing.map((one) => el("p", { class: "alarm", key: `missing ${one.uuid}` },
      el("strong", {}, `A GPU is missing: ${one.name} at ${one.pci_bus_id}.`), ` It was last read as GPU ${one.gpu}, ${seconds(status.time_seconds - one.seen_time_seconds)} ago. `,
      el("span", { class: "none" }, one.uuid))),
  ];
}

function identityOf(gpu) { return [gpu.name, gpu.pci_bus_id, gpu.uuid].filter(Boolean).join(", "); }

function drawInstances(gpus) {
  const instances = gpus.flatMap((gpu) => gpu.instances.map((one) => ({ ...one, gpu: gpu.gpu })));
  if (!instances.length) return [];
  const columns = [
    { title: "Instance", head: true, text: true, cell: (one) => `GPU ${one.gpu}, ${one.gpu_instance}/${one.compute_instance}` },
    { title: "Name", text: true, cell: (one) => one.name ?? "\u2013" },
    { title: "Memory", cell: (one) => [meter(ratioOf(one.memory_used_bytes, one.memory_size_bytes)), `${bytes(one.memory_used_bytes)} of ${bytes(one.memory_size_bytes)}`] },
    { title: "Processes", cell: (one) => number(one.processes) },
    { title: "UUID", text: true, cell: (one) => one.uuid ?? "\u2013" },
  ];
  const drawn = table("MIG instances", columns, instances, (one) => `${one.gpu}/${one.gpu_instance}/${one.compute_instance}`);
  return [el("h3", {}, "MIG instances"), scrolling("Table of MIG instances", drawn)];
}

function drawGpus(gpus) {
  if (!gpus.length) return [el("p", { class: "none" }, "No GPU is read on this node.")];
  const isWrong = gpus.some((gpu) => gpu.health_reasons.length);
  const columns = GPU_COLUMNS.filter(({ of }) => !of || gpus.some((gpu) => of.some((field) => gpu[field] !== null))) // not those that no GPU has
    .map((column) => (column.title === "State" ? { ...column, long: isWrong } : column));
  return [table("GPUs", columns, gpus, (gpu) => gpu.gpu, sorting.GPUs)];
}

function ledgerBar(ledger, isThin) {
  const total = HEADINGS.reduce((sum, heading) => sum + (ledger[heading] ?? 0), 0);
  if (!total) return null;
  const shares = HEADINGS.filter((heading) => ledger[heading]).map((heading) => [heading, ledger[heading] / total]);
  const text = shares.map(([heading, share]) => `${words(heading)} ${percent(share, 1)}`).join(", ");
  const bar = el("div", { class: isThin ? "bar thin" : "bar", role: "img", "aria-label": text, title: text },
    shares.map(([heading, share]) => el("i", { class: heading, key: heading, style: { width: `${(share * 100).toFixed(2)}%` } })));
  if (isThin) return bar;
  return [bar, el("ul", { class: "legend", "aria-hidden": "true" }, shares.map(([heading, share]) => el("li", { key: heading }, el("b", { class: heading }), `${words(heading)} ${percent(share, 1)}`)))];
}

function drawJobs(status) {
  const filter = $("filter").value.trim().toLowerCase();
  const jobs = status.jobs.filter((job) => job.title.toLowerCase().includes(filter));
  if (!jobs.length) return [el("p", { class: "none" }, status.jobs.length ? "No job has that in its name." : "No job reports to this daemon.")];
  const more = status.jobs_left_out ? [el("p", { class: "none" }, `${status.jobs_left_out} more jobs are in metrics.`)] : [];
  return [...jobs.map(drawJob), ...more];
}

function drawJob(job, order) {
  const facts = [
    ["Step", number(job.step)], ["Pace", job.pace_seconds === null ? null : `${seconds(job.pace_seconds)} a step`],
    ["Median rank", job.median_pace_seconds === null ? null : seconds(job.median_pace_seconds)],
    ["Samples", job.samples_per_second === null ? null : `${scaled(job.samples_per_second, "/s")}${job.samples_guessed ? " (a guess)" : ""}`],
    ["Tokens", job.tokens_per_second === null ? null : `${scaled(job.tokens_per_second, "/s")}`],
    ["MFU", job.mfu_ratio === null ? null : percent(job.mfu_ratio, 1)],
    ["Ranks here", `${job.ranks.length + job.ranks_left_out} of ${number(job.world_size)}`],
    ["User", job.uid === null ? null : `uid ${job.uid}`], ["Launch", job.launch || null],
    ["Last heard", job.last_record_age_seconds === null ? null : `${seconds(job.last_record_age_seconds)} ago`],
  ].filter(([, value]) => value !== null);
  const id = `job-${order}`;
  return el("article", { class: "job", key: `${job.job}@${job.launch}`, "aria-labelledby": id },
    el("h3", { id }, job.title, job.finished ? el("span", { class: "badge" }, "finished") : null, job.tuner ? el("span", { class: "badge" }, `tuner: ${job.tuner.state}`) : null),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", { key: name }, el("dt", {}, name), el("dd", {}, value)))),
    ...alarms(job),
    el("h4", {}, job.ledger_window_seconds === null ? "Where the last step went" : `Where the last ${seconds(job.ledger_window_seconds)} went`),
    job.ledger_seconds ? ledgerBar(job.ledger_seconds, false) : el("p", { class: "none" }, "No step was reported yet."),
    el("div", { class: "two" }, el("div", {}, el("h4", {}, "What if"), drawLadder(job.what_if, job.title)), el("div", {}, el("h4", {}, "Decisions"), drawMoves(job))),
    el("details", { key: "ranks" }, el("summary", {}, `Ranks (${job.ranks.length}${job.ranks_left_out ? ` of ${job.ranks.length + job.ranks_left_out}` : ""})`), scrolling(`Table of ranks of ${job.title}`, drawRanks(job))));
}

function alarms(job) {
  const late = job.stragglers.map((one) => el("p", { class: "alarm", key: `late-${one.rank}-${one.cause}` },
    `${one.rank === null ? "The ranks are held up" : `Rank ${one.rank} is late`} by ${seconds(one.excess_seconds)} a step since step ${number(one.since_step)} (${words(one.cause)}): ${one.evidence}`));
  const hung = job.hangs.map((one) => el("p", { class: "alarm", key: `hang-${one.rank}` },
    one.silent ? `Rank ${one.rank} says nothing while others wait: it may be what they wait for.` : `Rank ${one.rank} ends no step: it may hang.`));
  const why = job.hang_verdict ? [el("p", { class: "alarm", key: "hang-verdict" }, `The job hangs: ${job.hang_verdict}`)] : [];
  return [...why, ...late, ...hung];
}

function drawLadder(ladder, title) {
  if (!ladder) return el("p", { class: "none" }, "Not known yet.");
  const columns = [
    { title: "Without", head: true, text: true, cell: (rung) => words(rung.scenario.replace(/^at_most_/, "")) },
    { title: "Step at least", cell: (rung) => seconds(rung.step_seconds) },
    { title: "Saves at most", cell: (rung) => [meter(rung.gain_ratio), percent(rung.gain_ratio, 1)] },
  ];
  return [scrolling(`What if, ${title}`, table("What-if ladder", columns, ladder.rungs, (rung) => rung.scenario)),
    el("p", { class: "none" }, `Bounds over ${number(ladder.steps)} steps of ${seconds(ladder.pace_seconds)}, ${ladder.source}; they do not add up.`)];
}

function drawMoves(job) {
  const doing = job.tuner && job.tuner.detail ? el("p", { class: "none", key: "doing" }, `Now: ${job.tuner.detail}`) : null;
  if (!job.moves.length) return [doing, el("p", { class: "none", key: "none" }, job.tuner ? "None yet." : "No tuner speaks for this job here.")];
  return [doing, el("ol", { class: "moves", key: "moves", reversed: true }, job.moves.map(drawMove))];
}

function outcomeOf(move) { return move.outcome ?? (move.kind === "advise" ? "advice" : "on trial"); }

function drawMove(move) {
  const gains = [move.expected_gain_ratio === null ? null : `expected ${percent(move.expected_gain_ratio, 1)}`,
    move.measured_gain_ratio === null ? null : `measured ${percent(move.measured_gain_ratio, 1)}`].filter(Boolean).join(", ");
  const change = move.to_value === null ? "" : ` ${setting(move.knob, move.from_value)} \u2192 ${setting(move.knob, move.to_value)}`;
  return el("li", { key: move.decision, value: move.decision },
    el("p", {}, el("strong", {}, words(move.knob)), `${change} at step ${number(move.step)}: `,
      el("span", { class: move.outcome === "kept" ? "good" : move.outcome ? "bad" : "soft" }, words(outcomeOf(move))), gains ? ` (${gains})` : ""),
    move.reason ? el("p", { class: "none" }, `Why: ${move.reason}`) : null,
    move.outcome_reason ? el("p", { class: "none" }, `Then: ${move.outcome_reason}`) : null);
}

function setting(knob, value) { return knob.endsWith("_bytes") && typeof value === "number" ? bytes(value) : words(value); }

function drawRanks(job) {
  const late = new Set(job.stragglers.map((one) => one.rank));
  const columns = [
    { title: "Rank", head: true, sort: (r) => r.rank, cell: (r) => number(r.rank) },
    { title: "Where", text: true, cell: whereOf },
    { title: "Step", sort: (r) => r.step, cell: (r) => number(r.step) },
    { title: "Last step", sort: (r) => r.step_duration_seconds, cell: (r) => seconds(r.step_duration_seconds) },
    { title: "Ledger of the last step", text: true, cell: (r) => (r.ledger_seconds ? ledgerBar(r.ledger_seconds, true) : "\u2013") },
    { title: "MFU", sort: (r) => r.mfu_ratio, cell: (r) => percent(r.mfu_ratio, 1) },
    { title: "Allocated", sort: (r) => r.memory_allocated_bytes, cell: (r) => bytes(r.memory_allocated_bytes) },
    { title: "State", text: true, cell: (r) => (r.finished ? "finished" : !r.connected ? el("span", { class: "bad" }, "gone") : late.has(r.rank) ? el("span", { class: "bad" }, "late") : "ok") },
  ];
  return table(`Ranks of ${job.title}`, columns, job.ranks, (rank) => rank.rank, sorting[`Ranks of ${job.title}`]);
}

const LINK_COLUMNS = [
  { title: "Link", head: true, text: true, cell: (l) => l.name },
  { title: "Kind", text: true, cell: (l) => (l.kind === "rdma" ? "RDMA" : "network") },
  { title: "State", text: true, cell: (l) => (l.up === null ? "\u2013" : l.up ? "up" : el("span", { class: "bad" }, "down")) },
  { title: "Speed", cell: (l) => rate(l.link_bytes_per_second) },
  { title: "Received", cell: (l) => rate(l.receive_bytes_per_second) },
  { title: "Sent", cell: (l) => rate(l.transmit_bytes_per_second) },
  { title: "In use, in", cell: (l) => [meter(l.receive_utilization_ratio), percent(l.receive_utilization_ratio)] },
  { title: "In use, out", cell: (l) => [meter(l.transmit_utilization_ratio), percent(l.transmit_utilization_ratio)] },
  { title: "Errors and drops", cell: (l) => number(l.errors_total) },
];

function drawLinks(links) {
  if (!links.length) return [el("p", { class: "none" }, "No link is read on this node.")];
  return [table("Links", LINK_COLUMNS, links, (link) => `${link.kind} ${link.name}`)];
}

function recorderOf(recorder) {
  if (!recorder) return "off";
  const reasons = Object.entries(recorder.triggers_total).filter(([, count]) => count).map(([name, count]) => `${words(name)} ${number(count)}`);
  const wrote = recorder.files_total === 1 ? "1 recording" : `${number(recorder.files_total)} recordings`;
  return `the last ${seconds(recorder.span_seconds)} in ${bytes(recorder.memory_bytes)}; ${wrote} written${reasons.length ? ` (${reasons.join(", ")})` : ""}`;
}

function whereOf(rank) {
  const pod = rank.pod_name === null ? "" : `, pod ${rank.pod_namespace}/${rank.pod_name}`;
  return `${rank.host} ${rank.device} (${rank.pid})${pod}${rank.slurm_job === null ? "" : `, Slurm job ${rank.slurm_job}`}`;
}

function drawDaemon(status) {
  const own = status.daemon;
  const facts = [["Version", own.pacecar_version ?? "\u2013"], ["Runs for", seconds(own.start_time_seconds === null ? null : status.time_seconds - own.start_time_seconds)],
    ["Processor", own.cpu_utilization_ratio === null ? "\u2013" : `${percent(own.cpu_utilization_ratio, 1)} of a budget of ${percent(own.cpu_budget_ratio, 1)}`],
    ["Memory", bytes(own.resident_memory_bytes)], ["Viewers", number(own.viewers)], ["Flight recorder", recorderOf(own.recorder)]];
  const failed = own.collectors.filter((one) => one.outcome === "failed");
  const columns = [
    { title: "Collector", head: true, text: true, cell: (one) => one.name },
    { title: "Outcome", text: true, cell: (one) => el("span", { class: one.outcome === "failed" ? "bad" : null }, one.outcome) },
    { title: "Took", cell: (one) => seconds(one.duration_seconds) },
    { title: "Reason", text: true, long: true, cell: (one) => one.reason ?? "" },
  ];
  return [
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", { key: name }, el("dt", {}, name), el("dd", {}, value)))),
    ...(own.recorder && (own.recorder.lost_total || own.recorder.write_failures_total)
      ? [el("p", { class: "alarm", key: "recorder" }, `Flight recorder: ${number(own.recorder.write_failures_total)} writes failed, ${number(own.recorder.lost_total)} recordings lost`)] : []),
    ...failed.map((one) => el("p", { class: "alarm", key: one.name }, `${one.name}: ${one.reason}`)),
    el("details", { key: "collectors" }, el("summary", {}, `Collectors (${own.collectors.length})`), scrolling("Table of collectors", table("Collectors", columns, own.collectors, (one) => one.name))),
  ];
}

// --- the reader's actions

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  forgetColours();
  $("charts").replaceChildren();
  render();
}

function remembered() { try { return localStorage.getItem("pacecar-theme") || "auto"; } catch { return "auto"; } }

$("theme").value = remembered();
$("theme").addEventListener("change", (event) => {
  try { localStorage.setItem("pacecar-theme", event.target.value); } catch { /* private windows forget */ }
  setTheme(event.target.value);
});
$("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  event.target.setAttribute("aria-pressed", String(isPaused));
  event.target.textContent = isPaused ? "Go on" : "Pause";
  if (!isPaused) render();
  updateState();
});
$("filter").addEventListener("input", render);
$("span").addEventListener("change", render);
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-sort]");
  if (!button) return;
  const before = sorting[button.dataset.table];
  sorting[button.dataset.table] = { by: button.dataset.sort, down: !(before && before.by === button.dataset.sort && before.down) };
  render();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme($("theme").value));
addEventListener("resize", () => { if (!isPaused) render(); });
setTheme($("theme").value);
setInterval(updateState, 1000);
listen();
