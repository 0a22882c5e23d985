"use strict";
// Everything that comes from a run is written with textContent: it is never markup.
const COLORS = ["#3566c9", "#d9792b", "#2f9461", "#b8405e", "#7f58b5", "#8b7355", "#2b9bb0", "#888888"];
// The main curves are the first five of these that a run has; of runs with a reward the loss says little.
const MAIN = ["reward/mean", "eval/reward", "preference/accuracy", "reward_model/accuracy", "eval/accuracy", "update/loss", "eval/loss", "policy/entropy",
  "data/length_mean", "preference/margin", "preference/displacement", "kl/ref_k3", "update/grad_norm", "policy/perplexity", "update/lr", "throughput/tokens_per_s"];
const FIRST = ["reward/mean", "eval/reward", "update/loss", "eval/loss", "eval/accuracy", "update/grad_norm", "policy/entropy",
  "data/length_mean", "kl/ref_k3", "kl/old_k3", "mismatch/kl_k3", "update/clip_frac_high", "preference/accuracy",
  "preference/margin", "preference/displacement", "reward/zero_variance_groups", "data/truncated_frac", "update/lr", "throughput/tokens_per_s", "time/step_s"];
const PLAIN = { "reward/mean": "reward", "eval/reward": "reward on held-out prompts", "policy/entropy": "entropy of the policy", "data/length_mean": "length of responses", "data/lag_<versions>_frac": "rows by their lag in versions", "time/trainer_wait_s": "who waits: the trainer", "time/samplers_wait_s": "who waits: the samplers",
  "update/grad_norm": "norm of the gradient", "update/loss": "loss", "eval/loss": "loss on held-out rows", "preference/accuracy": "pairs in the right order",
  "reward_model/accuracy": "pairs in the right order", "eval/accuracy": "accuracy on held-out rows", "preference/margin": "margin between chosen and rejected",
  "preference/displacement": "fall of the chosen ones", "kl/ref_k3": "distance from the reference", "kl/old_k3": "distance of one update", "mismatch/kl_k3": "sampler against trainer",
  "policy/perplexity": "perplexity", "update/lr": "learning rate", "throughput/tokens_per_s": "speed", "time/step_s": "time of a step",
  "reward/zero_variance_groups": "groups that teach nothing", "data/truncated_frac": "responses cut short", "update/clip_frac_high": "tokens stopped by the clip" };
const UNITS = [[/tokens_per_s$/, "tokens per second"], [/^time\/|_s$/, "seconds"], [/_frac$|accuracy|_rate$|pass@|_groups$/, "share"], [/length|tokens$/, "tokens"], [/rss_mb/, "MB"],
  [/entropy|^kl\/|\/kl_|loss$|nll|logprobs?_|displacement|margin/, "nats"], [/reward/, "reward"]];
const PHASES = { "time/step_s": "the whole step", "time/rollout_s": "sampling responses", "time/reward_s": "waiting for rewards", "time/logprobs_s": "forward passes before the update",
  "time/update_s": "update: gradients and optimizer", "time/eval_s": "evaluation", "time/checkpoint_s": "writing checkpoints", "time/sync_s": "handing weights to the sampler (inside sampling and evaluation)",
  "time/trainer_wait_s": "training waits for samplers (inside sampling)", "time/samplers_wait_s": "samplers wait for training (beside the other phases)",
  "time/rows_s": "turning samples into rows", "time/samples_s": "writing samples, cutting minibatches", "time/record_s": "writing metrics, console", "time/setup_s": "start: models and workers" };
// What a run came to is told by these, as far as it measured them: metric -> which value is best.
const RESULTS = { "reward/mean": Math.max, "preference/accuracy": Math.max, "reward_model/accuracy": Math.max, "update/loss": Math.min,
  "eval/reward": Math.max, "eval/accuracy": Math.max, "eval/loss": Math.min };
// Runs that differ in nothing else are seeds of one.
const OF_A_SEED = new Set(["run.seed", "run.name", "run.dir"]);
const PAGE = 25;
const STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

const unpacked = new Map();
function unpack(id) {
  if (!unpacked.has(id)) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(id, new Response(stream).text().then(JSON.parse));
    // Texts that were read long ago may go: what was unpacked can be unpacked again.
    const texts = [...unpacked.keys()].filter((key) => key.startsWith("samples-"));
    if (texts.length > 40) unpacked.delete(texts[0]);
  }
  return unpacked.get(id);
}

const state = new URLSearchParams(location.hash.slice(1));
function remember(name, value) {
  if (value === "" || value === null || value === false) state.delete(name); else state.set(name, String(value));
  history.replaceState(null, "", "#" + state.toString());
}
function control(name, label, input) {
  if (input.type === "checkbox") input.checked = state.get(name) === "true"; else if (state.has(name)) input.value = state.get(name);
  input.id = "control-" + name;
  input.addEventListener("change", () => remember(name, input.type === "checkbox" ? input.checked : input.value));
  return make("label", { class: input.type === "checkbox" ? "row" : "" }, input.type === "checkbox" ? [input, label] : [label, input]);
}
function choice(options) { return make("select", {}, options.map(([value, text]) => make("option", { value }, text))); }
function number(value, digits = 5) { return value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(digits))); }
function cells(values, head) { return make("tr", {}, values.map((value) => make(head ? "th" : "td", { class: head ? "" : "wrap" }, value))); }
function failed(error) { document.documentElement.dataset.error = String(error && error.stack || error); }
window.addEventListener("error", (event) => failed(event.error || event.message));
window.addEventListener("unhandledrejection", (event) => failed(event.reason));

function wide(table) { return make("div", { class: "wide" }, table); }
function unitOf(name) { const found = UNITS.find(([pattern]) => pattern.test(name)); return found ? found[1] : name.split("/").pop().replaceAll("_", " "); }
function titleOf(name) { return PLAIN[name] ? `${PLAIN[name]} (${name})` : name; }
function duration(seconds) {
  if (!seconds) return "–";
  const s = Math.round(seconds);
  return s < 90 ? `${number(seconds, 3)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${number(s / 3600, 3)} h`;
}
function resultsOf(run) {
  const found = {};
  for (const [name, best] of Object.entries(RESULTS)) {
    const known = (run.metrics[name] || []).filter((value) => value !== null);
    if (known.length) found[name] = { first: known[0], last: known[known.length - 1], best: known.reduce((one, other) => best(one, other)) };
  }
  return found;
}
// The measure that a run is told by, and the one on held-out data: names of metrics, "" for none.
function measureOf(run, heldOut) { return Object.keys(run.results).find((name) => name.startsWith("eval/") === heldOut) || ""; }
function stepOf(run, name, value) { return run.metrics.step[run.metrics[name].indexOf(value)]; }
function stateOf(run) { return run.finished ? "finished" : `not finished: step ${run.last} of ${run.wanted}`; }
function wallOf(run) { return (run.metrics["time/step_s"] || []).reduce((sum, value) => sum + (value || 0), 0); }
function told(result) { return result ? `${number(result.first, 4)} → ${number(result.last, 4)}` : "–"; }
function spreadOf(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return [mean, values.length < 2 ? 0 : Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1))];
}
function seedGroups(data) {
  const groups = new Map();
  data.runs.forEach((run, place) => {
    const key = JSON.stringify(run.config.filter(([name]) => !OF_A_SEED.has(name)).map(([name, value]) => [name, value]));
    groups.set(key, [...(groups.get(key) || []), place]);
  });
  return [...groups.values()];
}
function colored(place, text) { const dot = make("span", {}, "● "); dot.style.color = COLORS[place % COLORS.length]; return [dot, text]; }

function headline(run) {
  const tile = (question, answer, ...lines) => make("div", { class: "tile" }, make("div", { class: "role" }, question), make("div", { class: "answer" }, answer), lines.map((line) => make("div", { class: "quiet" }, line)));
  const learned = [false, true].map((heldOut) => measureOf(run, heldOut)).filter((name) => name).map((name) => {
    const result = run.results[name];
    return tile(titleOf(name), told(result), `best ${number(result.best, 4)} at step ${stepOf(run, name, result.best)}`);
  });
  const seed = run.seed === "" ? "" : `, seed ${run.seed}`;
  return make("div", { class: "tiles" }, learned, tile("state", stateOf(run), `${run.last} of ${run.wanted} steps in ${duration(wallOf(run))}`), tile("what", run.algorithm || "", `on ${field(run, "model.name")}${seed}`));
}
function field(run, name) { const row = run.config.find(([other]) => other === name); return row ? row[1] : ""; }
function against(run, first) {
  const name = measureOf(run, false), mine = run.results[name], theirs = first.results[name];
  const change = mine && theirs ? mine.last - theirs.last : null;
  const before = new Map(first.config.map(([field, value]) => [field, value]));
  const others = run.config.filter(([field, value]) => before.has(field) && before.get(field) !== value && !OF_A_SEED.has(field)).map(([field, value]) => `${field} ${value} (${before.get(field)})`);
  return [change === null ? "" : `${change >= 0 ? "+" : "−"}${number(Math.abs(change), 3)}`, others.length ? make("div", { class: "quiet" }, others.slice(0, 4).join("; "), others.length > 4 ? ` and ${others.length - 4} more` : "") : ""];
}
function overview(data) {
  const several = data.runs.length > 1;
  const names = ["run", "measure", "first", "last", "best", ...(several ? ["last, against the first run"] : []), "held out: first → last", "best", "wall time", "seed", "state", "algorithm", "samples", "checkpoints"];
  const table = make("table", { id: "runs-table" }, cells(names, true));
  data.runs.forEach((run, place) => {
    const name = measureOf(run, false), heldOut = measureOf(run, true), result = run.results[name] || {};
    const kept = run.checkpoints.length > 3 ? `${run.checkpoints.length}, newest ${run.checkpoints[run.checkpoints.length - 1]}` : run.checkpoints.join(", ");
    const values = [colored(place, run.name), name, number(result.first, 4), number(result.last, 4), number(result.best, 4), ...(several ? [place ? against(run, data.runs[0]) : ""] : []),
      told(run.results[heldOut]), number((run.results[heldOut] || {}).best, 4), duration(wallOf(run)), run.seed, stateOf(run), run.algorithm || "", String(run.count), kept];
    table.append(make("tr", {}, values.map((value) => make("td", {}, value))));
  });
  for (const group of seedGroups(data).filter((places) => places.length > 1)) {
    const runs = group.map((place) => data.runs[place]), name = measureOf(runs[0], false), heldOut = measureOf(runs[0], true);
    const of = (metric, key) => {
      const values = runs.map((run) => (run.results[metric] || {})[key]).filter((value) => value !== undefined);
      if (!values.length) return "–";
      const [mean, deviation] = spreadOf(values);
      return `${number(mean, 4)} ± ${number(deviation, 2)}`;
    };
    const values = [[`${runs.length} seeds`, make("div", { class: "quiet" }, "mean ± standard deviation")], name, of(name, "first"), of(name, "last"), of(name, "best"), "", `${of(heldOut, "first")} → ${of(heldOut, "last")}`, of(heldOut, "best")];
    table.append(make("tr", { class: "changed", "data-seeds": runs.length }, values.map((value) => make("td", {}, value))));
  }
  return make("section", {}, make("h2", { id: "overview" }, "Runs"), wide(table));
}

const charts = [];
// Of metrics that are the ends of the interval of another one, and no curves of their own.
const ENDS = ["_low", "_high"];
function isEnd(name, metrics) { return ENDS.some((end) => name.endsWith(end) && metrics[name.slice(0, -end.length)]); }
// What a chart shows, for the screen and for its files: steps, and curves of a label, a colour and values, some with a band.
function chartOf(name, data, { log = false, smooth = 0, mean = false } = {}) {
  const having = (places) => places.filter((place) => data.runs[place].metrics[name]);
  const groups = (mean ? seedGroups(data) : data.runs.map((_, place) => [place])).map(having).filter((places) => places.length);
  const steps = [...new Set(groups.flat().flatMap((place) => data.runs[place].metrics.step))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  const spread = (place, metric = name) => {
    const run = data.runs[place], values = Array(steps.length).fill(null);
    soften(run.metrics[metric], smooth, log).forEach((value, index) => { values[at.get(run.metrics.step[index])] = value; });
    return values;
  };
  const lines = groups.map((places) => {
    const color = COLORS[places[0] % COLORS.length], each = places.map((place) => spread(place));
    const label = data.runs.length > 1 ? data.runs[places[0]].name : name;
    const band = places.length === 1 && ENDS.map((end) => name + end);
    if (band && band.every((end) => data.runs[places[0]].metrics[end])) {
      const [low, high] = band.map((end) => spread(places[0], end));
      return { label, color, values: each[0], low, high, edges: ["upper end of 95 %", "lower end of 95 %"] };
    }
    if (places.length === 1) return { label, color, values: each[0] };
    const found = steps.map((_, index) => each.map((values) => values[index]).filter((value) => value !== null)).map((values) => values.length ? spreadOf(values) : null);
    const shifted = (sign) => found.map((pair) => pair === null || (log && pair[0] + sign * pair[1] <= 0) ? null : pair[0] + sign * pair[1]);
    return { label: `${label}, mean of ${places.length} seeds`, color, values: shifted(0), low: shifted(-1), high: shifted(1), edges: ["plus deviation", "minus deviation"] };
  });
  return { name, steps, lines, log };
}
const HIGH = 230, LOW = 175;
function drawChart(box, chart, small = false) {
  const ink = getComputedStyle(document.body).color;
  const series = [{ label: "step" }], tables = [chart.steps], bands = [];
  for (const { label, color, values, own, low, high, edges } of chart.lines) {
    const bars = chart.stacked ? { fill: color, paths: uPlot.paths.bars({ size: [0.8] }), width: 0, points: { show: false }, value: (_, __, ___, at) => at === null ? "–" : number(own[at]) } : {};
    series.push({ label, stroke: color, width: 1.5, spanGaps: true, points: { show: chart.steps.length < 40 }, value: (_, value) => number(value), ...bars });
    tables.push(values);
    for (const [edge, told] of low ? [[high, edges[0]], [low, edges[1]]] : []) {
      series.push({ label: told, stroke: color + "66", width: 1, spanGaps: true, points: { show: false }, value: (_, value) => number(value) });
      tables.push(edge);
    }
    if (low) bands.push({ series: [series.length - 2, series.length - 1], fill: color + "22" });
  }
  const axis = { stroke: ink, grid: { stroke: "#8883" }, ticks: { stroke: "#8883" }, labelSize: 18, labelFont: "12px system-ui, sans-serif" };
  const steps = { ...axis, label: "optimizer step", size: 34, space: 36, incrs: STEPS, values: (_, ticks) => ticks.map(String) };
  const values = { ...axis, label: unitOf(chart.name), size: 60, values: (_, ticks, __, ___, apart) => ticks.map((tick) => tick === null ? "" : tickLabel(tick, chart.log ? null : apart)) };
  box.title = chart.name;
  const options = { width: widthOf(box), height: small ? LOW : HIGH, title: small ? PLAIN[chart.name] || chart.name : titleOf(chart.name), legend: { show: !small }, cursor: { sync: { key: "step" }, drag: { x: true, y: false } }, bands,
    scales: { x: chart.stacked ? { time: false, range: (_, first, last) => [first - 0.5, last + 0.5] } : { time: false }, y: chart.log ? { distr: 3 } : { range: chart.stacked ? fromZero : heightOf } }, axes: [steps, values], series };
  charts.push(new uPlot(options, tables, box));
  box.append(make("div", { class: "files" }, make("button", { onclick: () => save(chart, "csv", csvOf(chart)) }, "CSV"), make("button", { onclick: () => save(chart, "svg", svgOf(chart)) }, "SVG")));
  document.documentElement.dataset.charts = charts.length;
}
function widthOf(box) { return Math.max(180, box.clientWidth - 14); }
window.addEventListener("resize", () => charts.forEach((chart) => chart.setSize({ width: widthOf(chart.root.parentElement), height: chart.height })));
function save(chart, kind, text) {
  const link = make("a", { download: `${chart.name.replaceAll("/", "_")}.${kind}`, href: URL.createObjectURL(new Blob([text], { type: kind === "svg" ? "image/svg+xml" : "text/csv" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
function csvOf(chart) {
  const cell = (value) => value === null ? "" : typeof value === "number" ? String(Number(value.toPrecision(10))) : /[",\r\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value);
  const columns = chart.lines.flatMap(({ label, values, own, low, high, edges }) => own ? [[label, own]] : low ? [[label, values], [`${label}, ${edges[1]}`, low], [`${label}, ${edges[0]}`, high]] : [[label, values]]);
  const rows = chart.steps.map((step, index) => [step, ...columns.map(([, values]) => values[index])]);
  return [["step", ...columns.map(([label]) => label)], ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
// Marks at round numbers, about five of them.
function marks(least, most) {
  const raw = (most - least) / 5, power = 10 ** Math.floor(Math.log10(raw)), apart = [1, 2, 5, 10].find((digit) => digit * power >= raw) * power;
  const found = [];
  for (let value = Math.ceil(least / apart) * apart; value <= most + apart / 1e6; value += apart) found.push(Number(value.toPrecision(12)));
  return found;
}
function svgOf(chart) {
  const W = 640, H = 360, L = 70, R = 14, T = 34, B = 44 + (chart.lines.length > 1 ? 12 + 16 * chart.lines.length : 0);
  const safe = (text) => String(text).replace(/[^\t\n\r\x20-\ud7ff\ue000-\ufffd]/g, "\ufffd").replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const scaled = (value) => value === null ? null : chart.log ? Math.log10(value) : value;
  const all = chart.lines.flatMap(({ values, low, high }) => [...values, ...(low || []), ...(high || [])]).filter((value) => value !== null).map(scaled);
  let [least, most] = (chart.stacked ? fromZero : heightOf)(null, all.length ? Math.min(...all) : null, all.length ? Math.max(...all) : null);
  const first = chart.steps[0] ?? 0, last = Math.max(first + 1, chart.steps[chart.steps.length - 1] ?? 1);
  const x = (step) => L + (W - L - R) * (step - first) / (last - first), y = (value) => T + (H - T - B) * (1 - (scaled(value) - least) / (most - least));
  const points = (values) => values.map((value, index) => value === null ? "" : `${x(chart.steps[index]).toFixed(1)},${y(value).toFixed(1)}`).filter((point) => point);
  const text = (at, down, words, more = "") => `<text x="${at}" y="${down}" ${more}>${safe(words)}</text>`;
  const parts = [text(W / 2, 18, titleOf(chart.name), 'text-anchor="middle" font-size="14"'), text((L + W - R) / 2, H - B + 34, "optimizer step", 'text-anchor="middle"'),
    text(14, (T + H - B) / 2, unitOf(chart.name) + (chart.log ? ", logarithmic" : ""), `text-anchor="middle" transform="rotate(-90 14 ${(T + H - B) / 2})"`)];
  for (const value of marks(least, most)) {
    const down = T + (H - T - B) * (1 - (value - least) / (most - least));
    parts.push(`<path d="M${L} ${down.toFixed(1)}H${W - R}" stroke="#ddd"/>`, text(L - 6, (down + 4).toFixed(1), number(chart.log ? 10 ** value : value, 3), 'text-anchor="end"'));
  }
  for (const step of marks(first, last).filter(Number.isInteger)) parts.push(text(x(step).toFixed(1), H - B + 16, step, 'text-anchor="middle"'));
  chart.lines.forEach(({ label, color, values, low, high }, place) => {
    if (low) parts.push(`<polygon points="${[...points(high), ...points(low).reverse()].join(" ")}" fill="${color}" fill-opacity="0.15"/>`);
    const wide = Math.max(1, (W - L - R) / (last - first) * 0.8), foot = T + H - T - B;
    if (chart.stacked) values.forEach((value, index) => { if (value) parts.push(`<rect x="${(x(chart.steps[index]) - wide / 2).toFixed(1)}" y="${y(value).toFixed(1)}" width="${wide.toFixed(1)}" height="${(foot - y(value)).toFixed(1)}" fill="${color}"/>`); });
    else parts.push(`<polyline points="${points(values).join(" ")}" fill="none" stroke="${color}" stroke-width="1.5"/>`);
    if (chart.lines.length > 1) parts.push(text(L, H - B + 50 + 16 * place, `● ${label}`, `fill="${color}"`));
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${W} ${H}" width="${W}" height="${H}" font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>${parts.join("")}</svg>\n`;
}
// A curve that stays at one value lies in the middle, and not in a range that uPlot makes up.
function heightOf(_, least, most) {
  if (least === null) return [0, 1];
  if (least !== most) return uPlot.rangeNum(least, most, 0.1, true);
  const room = Math.abs(least) / 10;
  return least === 0 ? [0, 1] : [least - room, most + room];
}
function fromZero(_, __, most) { return [0, most || 1]; }
// As many digits as tell a mark of the axis from the next one, of which some are 2.5 apart.
function tickLabel(value, apart) {
  if (value === 0 || !apart) return number(value, 3);
  return number(value, Math.min(9, Math.max(1, Math.floor(Math.log10(Math.abs(value)) + 1e-9) - Math.floor(Math.log10(apart) + 1e-9) + 2)));
}
function soften(values, smooth, log) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : smooth * mean + (1 - smooth) * value;
    return log && mean <= 0 ? null : mean;
  });
}
function namesOf(data) { return [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== "step" && !data.runs.some((run) => isEnd(name, run.metrics))).sort(); }
function figureOf(name) { const box = make("figure", { "data-name": name, tabindex: 0 }); return box; }
function mainNames(data) {
  const names = namesOf(data), kinds = MAIN.filter((name) => names.includes(name) && !(name === "update/loss" && data.runs.every((run) => run.metrics["reward/mean"])));
  return kinds.slice(0, 5);
}
// The curves that tell most, drawn before anything is scrolled to.
function mainCurves(data, names) {
  const grid = make("div", { id: "main-charts", class: data.curves && data.curves.length ? "grid" : "grid small" }, names.map(figureOf));
  const mean = seedGroups(data).some((places) => places.length > 1);
  const note = mean ? make("div", { class: "quiet" }, "Curves of seeds: their mean, and one standard deviation to both sides.") : "";
  return [[grid, note], () => { for (const box of grid.children) drawChart(box, chartOf(box.dataset.name, data, { mean }), grid.classList.contains("small")); }];
}
function curves(data) {
  const names = namesOf(data), seeds = seedGroups(data).some((places) => places.length > 1);
  const search = control("metric", "metric", make("input", { placeholder: "part of a name" }));
  const all = control("all", `all ${names.length} metrics`, make("input", { type: "checkbox" }));
  const log = control("log", "logarithmic", make("input", { type: "checkbox" }));
  const mean = control("mean", "mean and spread over seeds", make("input", { type: "checkbox" }));
  const smooth = control("smooth", "smoothing", choice([["0", "none"], ["0.6", "some"], ["0.9", "much"]]));
  const grid = make("div", { class: "grid", id: "charts" });
  let waiting = [], mine = [];
  const drawNow = (box) => {
    if (box.firstChild) return;
    const settings = { log: log.firstElementChild.checked, smooth: Number(smooth.lastElementChild.value), mean: mean.firstElementChild.checked };
    drawChart(box, chartOf(box.dataset.name, data, settings));
    mine.push(charts[charts.length - 1]);
  };
  // One after the other, so that the page answers meanwhile; whoever prints has them all.
  const go = () => { if (waiting.length) { drawNow(waiting.shift()); setTimeout(go); } };
  window.addEventListener("beforeprint", () => waiting.splice(0).forEach(drawNow));
  const draw = () => {
    mine.splice(0).forEach((chart) => { charts.splice(charts.indexOf(chart), 1); chart.destroy(); });
    const part = search.lastElementChild.value.toLowerCase();
    const first = FIRST.filter((name) => names.includes(name));
    const wanted = part ? names.filter((name) => name.toLowerCase().includes(part)) : all.firstElementChild.checked || !first.length ? names : first;
    grid.dataset.wanted = wanted.length;
    grid.replaceChildren(...wanted.map(figureOf));
    if (!wanted.length) grid.append("no metric is called like that");
    const idle = !waiting.length;
    waiting = [...grid.querySelectorAll("figure")];
    if (idle) go();
  };
  const bar = make("div", { class: "bar" }, search, all, log, seeds ? mean : null, smooth,
    make("button", { onclick: () => charts.forEach((chart) => chart.setData(chart.data, true)) }, "whole range"),
    make("span", { class: "quiet" }, "drag to zoom in, double click to zoom out"));
  bar.addEventListener("change", draw);
  return [make("section", {}, make("h2", { id: "curves" }, "Curves"), bar, grid), draw];
}

const VERDICTS = { ok: () => "ok", warning: (check) => `warning since step ${check.step}`, unknown: () => "not measured" };
function health(data) {
  const several = data.runs.length > 1, names = several ? data.runs.map((run) => run.name) : ["verdict"];
  const table = make("table", { class: "checks" }, cells(["check", ...names, "threshold", "what it means and what to do"], true));
  const rows = data.runs[0].health.map((_, place) => data.runs.map((run) => run.health[place]));
  const calm = (found) => Number(!found.some((check) => check.state === "warning"));
  rows.sort((one, other) => calm(one) - calm(other)).forEach((found) => {
    const first = found[0];
    const told = (check) => VERDICTS[check.state](check) + (check.does === "off" ? " (silenced)" : "");
    const verdicts = found.map((check) => make("td", { class: check.state, "data-state": check.state }, told(check)));
    const advice = !calm(found) ? [first.advice, make("span", { class: "quiet" }, ` ${first.page}`)] : [];
    table.append(make("tr", { "data-check": first.name }, make("td", {}, first.name), verdicts, make("td", { class: "wrap" }, first.threshold), make("td", { class: "wrap" }, advice)));
  });
  const counted = (state) => data.runs.flatMap((run) => run.health).filter((check) => check.state === state && check.does !== "off").length;
  const measured = counted("ok") + counted("warning"), unknown = counted("unknown");
  const calmly = `${measured ? `all ${measured} checks that could be made are well` : "nothing could be checked"}${unknown ? `; ${unknown} read numbers that were not measured` : ""}`;
  const warns = (check) => check.state === "warning" && check.does !== "off";
  // A check that warns of several runs is explained once.
  const open = rows.filter((found) => found.some(warns)).map((found) => {
    const since = found.map((check, place) => warns(check) ? `${several ? `in ${data.runs[place].name} ` : ""}since step ${check.step}` : "").filter((words) => words);
    return make("p", { class: "warned" }, make("b", { class: "warning" }, `${found[0].name} ${since.join(", ")}: `), found[0].advice, make("span", { class: "quiet" }, ` ${found[0].page}`));
  });
  return make("section", { id: "health-section" }, open, make("details", {}, make("summary", { id: "health", class: open.length ? "warning" : "ok" }, "Health: ", open.length ? `${counted("warning")} of ${measured} checks warn` : calmly), make("div", { class: "scroll" }, table)));
}
// Bars per step of a run that samples while it trains, each part on top of those before: of [name, [[label, values], ...]].
function stacksOf(run) {
  const of = (name) => run.metrics[name] || [], lags = Object.keys(run.metrics).map((name) => [name, /^data\/lag_(\d+)_frac$/.exec(name)]).filter(([, found]) => found);
  lags.sort((one, other) => one[1][1] - other[1][1]);
  const stacks = lags.length ? [["data/lag_<versions>_frac", lags.map(([name, found]) => [`lag ${found[1]}`, of(name)])]] : [];
  for (const name of ["time/trainer_wait_s", "time/samplers_wait_s"].filter((name) => of(name).some((value) => value !== null))) {
    const busy = of("time/step_s").map((value, place) => Math.max(0, (value || 0) - (of(name)[place] || 0)));
    stacks.push([name, [["waits", of(name)], ["busy", busy]]]);
  }
  return stacks.map(([name, parts]) => {
    const sums = run.metrics.step.map(() => 0);
    const lines = parts.map(([label, values], place) => ({ label, color: COLORS[place % COLORS.length], own: sums.map((_, at) => values[at] || 0), values: sums.map((_, at) => { sums[at] += values[at] || 0; return sums[at]; }) }));
    return { name, steps: run.metrics.step, lines: lines.reverse(), stacked: true }; // the highest is drawn first, behind the others
  });
}
function phases(data) {
  const section = make("section", {}, make("h2", { id: "phases" }, "Time per step")), later = [];
  data.runs.forEach((run) => {
    const table = make("table", {}, cells(["phase", "seconds, mean", "share of the step"], true));
    // A phase that was not in a step took no time in it.
    const means = Object.entries(run.metrics).filter(([name]) => name.startsWith("time/")).map(([name, values]) => [name, values.reduce((sum, value) => sum + (value || 0), 0) / Math.max(1, run.metrics.step.length)]);
    const whole = (means.find(([name]) => name === "time/step_s") || [])[1];
    for (const [name, mean] of means.sort((one, other) => other[1] - one[1])) {
      const share = whole ? mean / whole : null, bar = make("span", { class: "share" });
      bar.style.width = `${Math.round(120 * Math.min(1, share || 0))}px`;
      table.append(make("tr", {}, make("td", {}, PHASES[name] || name, PHASES[name] ? make("div", { class: "quiet" }, name) : ""), make("td", { class: "number" }, number(mean, 3)), make("td", {}, bar, share === null ? "" : ` ${Math.round(100 * share)} %`)));
    }
    const grid = make("div", { class: "grid" }, stacksOf(run).map((stack) => {
      const box = figureOf(stack.name);
      later.push(() => drawChart(box, stack));
      return box;
    }));
    section.append(data.runs.length > 1 ? make("h3", {}, run.name) : "", wide(table), grid);
  });
  return [section, () => later.forEach((draw) => draw())];
}
// One prompt as it was answered early and late; two prompts where none came twice.
async function beforeAndAfter(data) {
  const number = data.runs.findIndex((run) => run.count);
  if (number < 0) return "";
  const run = data.runs[number], index = await unpack(`index-${number}`), first = new Map();
  let pair = [0, 0];
  index.prompt.forEach((prompt, place) => {
    if (!first.has(prompt)) first.set(prompt, place);
    else if (index.step[place] - index.step[first.get(prompt)] > index.step[pair[1]] - index.step[pair[0]]) pair = [first.get(prompt), place];
  });
  const repeated = index.step[pair[0]] !== index.step[pair[1]];
  const last = index.step.findIndex((step) => step === index.step[index.step.length - 1]);
  if (!repeated && !last) return ""; // of one step: there is no early and late yet
  if (!repeated) pair = [0, last];
  const cards = [];
  for (const place of pair) {
    const line = (await unpack(`samples-${number}-${Math.floor(place / 250)}`))[place % 250];
    cards.push(sampleCard(line, place, { run: { token_steps: [] }, grouped: true }));
  }
  const title = repeated ? "One prompt, answered at the start and at the end" : "The first and the last answer (no prompt came twice)";
  return make("section", { id: "before-after" }, make("h2", {}, title, data.runs.length > 1 ? make("span", { class: "quiet" }, ` ${run.name}`) : ""), make("div", { class: "pair" }, cards));
}
function fields(data, key, title, heading) {
  const names = [...new Set(data.runs.flatMap((run) => run[key].map((row) => row[0])))];
  const rows = data.runs.map((run) => new Map(run[key].map((row) => [row[0], row])));
  const table = make("table", {}, cells(heading(data.runs.map((run) => run.name)), true));
  for (const name of names) {
    const values = rows.map((found) => found.get(name));
    const texts = values.map((row) => row ? row[1] : "(not read)");
    const marked = values.find((row) => row && row[2] !== null && row[2] !== undefined);
    const differs = new Set(texts).size > 1;
    const line = cells(key === "config" ? [name, ...texts, marked ? marked[2] : ""] : [name, ...texts]);
    if (marked) line.classList.add("changed");
    if (differs) line.classList.add("differs");
    table.append(line);
  }
  return make("section", {}, make("h2", { id: key }, title), make("div", { class: "scroll" }, table));
}
function starts(data) {
  const table = make("table", {}, cells(["run", "start", "", "what was another"], true));
  data.runs.forEach((run) => run.starts.forEach((start) =>
    table.append(cells([run.name, start.time || "", start.resuming ? "went on" : "began", start.changes.join("; ")]))));
  return make("section", {}, make("h2", { id: "starts" }, "Starts"), wide(table));
}

function messages(list) {
  return list.map((message) => make("div", { class: "message " + (message.role === "assistant" ? "assistant" : "") },
    make("div", { class: "role" }, String(message.role || "")), ...shown(message.content)));
}
// Texts and images of a message, in their order.
function shown(content) {
  if (!Array.isArray(content) || !content.some((part) => part && part.type === "image")) return [textBox(content)];
  return content.map((part) => part && part.type === "image" ? picture(String(part.image)) : textBox([part]));
}
function picture(name) {
  const id = "image-" + name;
  if (!/^[0-9a-f]{64}$/.test(name) || !document.getElementById(id)) return make("div", { class: "quiet" }, `image ${name} (not in this page)`);
  const image = make("img", { class: "picture", alt: "image " + name.slice(0, 12), title: name });
  unpack(id).then((url) => { image.src = url; }).catch(failed);
  return image;
}
function words(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.map((part) => part && part.type === "text" ? part.text : JSON.stringify(part)).join("\n");
  return typeof value === "string" ? value : JSON.stringify(value);
}
// A text as far as a page can set it at once: thousands of marks over one letter hold up a browser for seconds.
const LONGEST = 10000;
function textBox(value, more = "") {
  const whole = words(value), text = whole.replace(/(\p{M}{8})\p{M}+/gu, "$1…").slice(0, LONGEST).replace(/[\ud800-\udbff]$/, "");
  const box = make("div", { class: "text" + more }, text);
  if (text !== whole) box.append(make("button", { class: "whole", onclick: () => box.replaceChildren(whole) }, `all ${whole.length.toLocaleString("en")} characters`));
  return box;
}
// Every text in a value, and nothing of its form.
function said(value) {
  if (value === null || typeof value !== "object") return typeof value === "string" ? value : "";
  const inside = Array.isArray(value) ? value : Object.entries(value).filter(([name]) => !["role", "type", "image"].includes(name)).map(([, part]) => part);
  return inside.map(said).join("\n");
}
const TOLD = new Set(["uid", "images", "draw", "sample", "step", "prompt", "messages", "response", "reward", "status", "reason", "advantage", "versions", "finish_reason", "answer",
  "opening", "turns", "end", "source", "seed"]);
function sampleCard(line, place, browser) {
  const chips = [`step ${line.step}`, `draw ${line.draw}`, `sample ${line.sample}`, `reward ${number(line.reward)}`, line.end || line.finish_reason,
    `advantage ${number(line.advantage)}`, line.source].filter((text) => text).map((text) => make("span", { class: "chip" }, text));
  if (line.status !== "ok") chips.push(make("span", { class: "chip failed" }, `${line.status}: ${String(line.reason).slice(0, 500)}`));
  const card = make("article", { class: "sample", "data-place": place }, make("div", {}, chips,
    browser.grouped ? null : make("button", { onclick: () => browser.openGroup(line.step, line.draw) }, "group")));
  // "prompt" is what the last message says: a text, or parts of text and images.
  const prompt = Array.isArray(line.messages) ? line.messages : Array.isArray(line.prompt) ? [{ role: "user", content: line.prompt }] : null;
  if (!line.turns) card.append(...(prompt ? messages(prompt) : [textBox(line.prompt, " quiet")]));
  if (line.turns) {
    card.append(...messages(line.opening || []));
    line.turns.forEach((turn, index) => card.append(make("div", { class: "message assistant" }, make("div", { class: "role" }, `turn ${index + 1}, reward ${number(turn.reward)} ${String(turn.reason || "").slice(0, 500)}`),
      textBox(turn.text)), ...messages(turn.messages || [])));
  } else card.append(make("div", { class: "message assistant" }, make("div", { class: "role" }, "response"), textBox(line.response)));
  if (line.answer !== null && line.answer !== undefined) card.append(textBox("answer: " + words(line.answer), " quiet"));
  if (line.reason && line.status === "ok") card.append(textBox(line.reason, " quiet"));
  const others = Object.entries(line).filter(([name]) => !TOLD.has(name));
  if (others.length) card.append(make("details", {}, make("summary", {}, "more"), textBox(others.map(([name, value]) => `${name}: ${words(value)}`).join("\n"))));
  if (browser.run.token_steps.includes(line.step)) card.append(browser.tokenButton(place, line.step));
  return card;
}
function tokenView(tokens) {
  const names = ["mask", ...Object.keys(tokens.numbers)];
  const pick = choice(names.map((name) => [name, name]));
  if (names.includes("advantage")) pick.value = names.includes(state.get("color")) ? state.get("color") : "advantage";
  const box = make("div", { class: "tokens" });
  const paint = () => {
    const name = pick.value;
    const values = name === "mask" ? tokens.mask : tokens.numbers[name];
    const center = name === "ratio" ? 1 : 0;
    const inside = values.filter((value, at) => tokens.mask[at] && value !== null).map((value) => Math.abs(value - center));
    const most = Math.max(1e-9, ...inside);
    box.replaceChildren(...tokens.texts.map((text, at) => {
      const value = values[at];
      const about = names.slice(1).map((other) => `${other} ${number(tokens.numbers[other][at], 3)}`).join("\n");
      const part = make("span", { class: tokens.mask[at] ? "" : "context", title: about }, text);
      if (tokens.mask[at] && value !== null) {
        const away = (value - center) / most;
        part.style.backgroundColor = `rgba(${away < 0 ? "194,64,42" : "53,102,201"},${Math.min(1, Math.abs(away)) * 0.6})`;
      }
      return part;
    }));
  };
  pick.addEventListener("change", () => { remember("color", pick.value); paint(); });
  paint();
  return make("div", {}, make("label", {}, "color by ", pick), box);
}
async function sampleBrowser(data) {
  const section = make("section", {}, make("h2", { id: "samples" }, "Samples"));
  const withSamples = data.runs.map((run, place) => [run, place]).filter(([run]) => run.count);
  if (!withSamples.length) { section.append("These runs have no samples: they learn from given rows."); return section; }
  const runPick = control("run", "run", choice(withSamples.map(([run, place]) => [place, run.name])));
  const all = (name) => [...new Set(withSamples.flatMap(([run]) => run.words[name]))].filter((word) => word !== "");
  const picks = {};
  for (const [name, label] of [["status", "status"], ["end", "end"], ["source", "source"]]) picks[name] = control(name, label, choice([["", "any"], ...all(name).map((word) => [word, word])]));
  // One to choose from is no choice.
  const told = Object.entries(picks).filter(([name]) => all(name).length > 1 || state.has(name)).map(([, pick]) => pick);
  const ranges = {};
  for (const name of ["step", "reward", "length", "draw"]) for (const end of ["from", "to"]) ranges[`${name}-${end}`] = control(`${name}-${end}`, `${name} ${end}`, make("input", { type: "number", step: "any" }));
  const text = control("text", "text", make("input", { placeholder: "in prompt or response" }));
  const order = control("order", "order", choice([["", "newest first"], ["oldest", "oldest first"], ["best", "best first"], ["worst", "worst first"], ["longest", "longest first"]]));
  const bar = make("div", { class: "bar" }, withSamples.length > 1 ? runPick : null, Object.values(ranges), told, text, order);
  const count = make("span", { id: "count" });
  const list = make("div", { id: "list" });
  const group = make("div", { id: "group" });
  const older = make("button", { onclick: () => show(at - PAGE) }, "back");
  const newer = make("button", { onclick: () => show(at + PAGE) }, "further");
  let found = [], at = 0, turn = 0;
  const value = (label) => label.lastElementChild.value;
  const chosen = () => withSamples.length > 1 ? Number(value(runPick)) : withSamples[0][1];
  const read = async (number, place) => (await unpack(`samples-${number}-${Math.floor(place / 250)}`))[place % 250];
  function browserOf(number, grouped) {
    return { run: data.runs[number], grouped, openGroup: (step, draw) => openGroup(number, step, draw),
      tokenButton: (place, step) => {
        const holder = make("div", {});
        holder.append(make("button", { class: "tokens-button", onclick: async () => {
          const tokens = (await unpack(`tokens-${number}-${step}`))[String(place)];
          holder.replaceChildren(tokens ? tokenView(tokens) : "no tokens are kept of a sample that was not trained on");
        } }, "tokens"));
        return holder;
      } };
  }
  async function openGroup(number, step, draw) {
    const index = await unpack(`index-${number}`);
    const places = index.step.map((_, place) => place).filter((place) => index.step[place] === step && index.draw[place] === draw);
    const cards = [];
    for (const place of places) cards.push(sampleCard(await read(number, place), place, browserOf(number, true)));
    group.replaceChildren(make("h3", {}, `Group: step ${step}, draw ${draw}, ${places.length} samples `, make("button", { onclick: () => group.replaceChildren() }, "close")), make("div", { class: "group" }, cards));
    group.dataset.count = places.length;
    group.scrollIntoView({ block: "nearest" });
  }
  async function filter() {
    const mine = ++turn, number = chosen(), index = await unpack(`index-${number}`);
    let places = index.step.map((_, place) => place);
    for (const name of ["status", "end", "source"]) {
      const word = value(picks[name]);
      if (word !== "") places = places.filter((place) => index[name][place] === word);
    }
    for (const [key, label] of Object.entries(ranges)) {
      if (value(label) === "") continue;
      const [name, end] = key.split("-"), limit = Number(value(label));
      places = places.filter((place) => index[name][place] !== null && (end === "from" ? index[name][place] >= limit : index[name][place] <= limit));
    }
    const by = { "": (place) => -place, oldest: (place) => place, best: (place) => -(index.reward[place] ?? -Infinity), worst: (place) => index.reward[place] ?? Infinity, longest: (place) => -index.length[place] }[value(order)];
    const keys = new Map(places.map((place) => [place, by(place)]));
    const part = value(text).toLowerCase();
    if (part) {
      const kept = [];
      places.sort((a, b) => a - b);
      for (let start = 0; start < places.length; start += 250) {
        for (const place of places.slice(start, start + 250)) {
          const line = await read(number, place);
          if (said([line.prompt, line.response, line.opening, line.turns, line.messages]).toLowerCase().includes(part)) kept.push(place);
        }
        if (mine !== turn) return;
        count.textContent = `${kept.length} found in ${Math.min(start + 250, places.length)} of ${places.length} …`;
        await new Promise((next) => setTimeout(next));
      }
      places = kept;
    }
    if (mine !== turn) return;
    found = places.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
    document.documentElement.dataset.found = found.length;
    await show(0);
  }
  async function show(start) {
    at = Math.max(0, Math.min(start, Math.max(0, found.length - 1)));
    const number = chosen(), cards = [];
    for (const place of found.slice(at, at + PAGE)) cards.push(sampleCard(await read(number, place), place, browserOf(number, false)));
    list.replaceChildren(...cards);
    count.textContent = found.length ? `${at + 1} to ${Math.min(at + PAGE, found.length)} of ${found.length} samples` : "no sample is like that";
    older.disabled = at === 0; newer.disabled = at + PAGE >= found.length;
    document.documentElement.dataset.shown = cards.length;
  }
  bar.addEventListener("change", () => filter().catch(failed));
  section.append(bar, make("div", { class: "bar" }, count, older, newer), group, list);
  await filter();
  if (state.has("group")) { const [step, draw] = state.get("group").split("/").map(Number); await openGroup(chosen(), step, draw); }
  if (state.has("color")) { const button = list.querySelector(".tokens-button"); if (button) button.click(); }
  return section;
}

async function begin() {
  const data = await unpack("runs");
  await Promise.all(data.runs.map(async (run, number) => {
    run.metrics = await unpack(`metrics-${number}`);
    run.metrics.step = run.metrics.step || [];
    run.results = resultsOf(run);
    run.seed = field(run, "run.seed");
    run.wanted = field(run, "run.steps");
    run.algorithm = field(run, "train.alg_name");
    run.last = run.metrics.step.length ? run.metrics.step[run.metrics.step.length - 1] : 0;
  }));
  const main = document.getElementById("report");
  const asked = data.curves || [], known = namesOf(data), unknown = asked.filter((name) => !known.includes(name));
  const [shownFirst, drawMain] = mainCurves(data, asked.length ? asked.filter((name) => known.includes(name)) : mainNames(data));
  if (data.curves) {
    // Part of a notebook: what is asked for, and no more.
    main.append(...(asked.length ? [] : [headline(data.runs[0]), health(data)]), ...shownFirst);
    if (unknown.length) main.append(make("p", { class: "warned" }, `no metric is called ${unknown.join(", ")}; there are ${known.join(", ")}`));
    drawMain();
    document.documentElement.dataset.ready = "true";
    return;
  }
  const several = data.runs.length > 1, [curveSection, draw] = curves(data), runs = overview(data);
  const follow = data.live ? control("follow", "follow (every 10 s)", make("input", { type: "checkbox" })) : null;
  main.append(make("h1", {}, data.runs.map((run) => run.name).join(", ")),
    make("nav", {}, ["health", "overview", "curves", "samples", "phases", "config", "environment", "starts"].map((name) => make("a", { href: "#", onclick: (event) => { event.preventDefault(); document.getElementById(name).scrollIntoView(); } }, { overview: "runs", phases: "time", config: "configuration" }[name] || name)), follow),
    several ? runs : headline(data.runs[0]), ...data.runs.flatMap((run) => run.notes.map((note) => make("p", { class: "warned" }, several ? `${run.name}: ${note}` : note))), health(data), ...shownFirst);
  drawMain();
  main.append(await beforeAndAfter(data), several ? "" : runs, curveSection);
  draw();
  const [timeSection, drawTimes] = phases(data);
  main.append(await sampleBrowser(data), timeSection,
    fields(data, "config", "Configuration", (names) => ["field", ...names, "default, where it is another"]),
    fields(data, "environment", "Environment", (names) => ["", ...names]), starts(data));
  drawTimes();
  main.append(make("p", { class: "quiet" }, "Made by oxrl report. The charts are uPlot's (MIT licence, Leon Sorokin)."));
  document.title = `oxRL: ${data.runs.map((run) => run.name).join(", ")}`;
  if (follow) setInterval(() => { if (follow.firstElementChild.checked) location.reload(); }, 10000);
  document.documentElement.dataset.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.documentElement.dataset.ready = "true";
}
begin().catch(failed);
