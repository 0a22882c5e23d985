"use strict";
// Everything that comes from a run is written with textContent: it is never markup.
const COLORS = ["#3566c9", "#d9792b", "#2f9461", "#b8405e", "#7f58b5", "#8b7355", "#2b9bb0", "#888888"];
const FIRST = ["reward/mean", "eval/reward", "update/loss", "eval/loss", "eval/accuracy", "update/grad_norm", "policy/entropy",
  "data/length_mean", "kl/ref_k3", "kl/old_k3", "mismatch/kl_k3", "update/clip_frac_high", "preference/accuracy",
  "preference/margin", "preference/displacement", "reward/zero_variance_groups", "data/truncated_frac", "update/lr", "throughput/tokens_per_s", "time/step_s"];
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

function overview(data) {
  const table = make("table", {}, cells(["run", "algorithm", "steps", "samples", "checkpoints", "state"], true));
  data.runs.forEach((run, place) => {
    const dot = make("span", {}, "● ");
    dot.style.color = COLORS[place % COLORS.length];
    table.append(make("tr", {}, make("td", {}, dot, run.name), make("td", {}, run.algorithm || ""), make("td", {}, `${run.last} of ${run.wanted}`),
      make("td", {}, String(run.count)), make("td", {}, run.checkpoints.join(", ")), make("td", {}, run.finished ? "finished" : "not finished")));
  });
  return make("section", {}, make("h2", { id: "overview" }, "Runs"), table);
}

const charts = [];
function drawChart(box, name, data, log, smooth) {
  const tables = [];
  data.runs.forEach((run) => { if (run.metrics[name]) tables.push([run.metrics.step, soften(run.metrics[name], smooth, log)]); });
  const shown = data.runs.map((run, place) => [run, place]).filter(([run]) => run.metrics[name]);
  const series = [{ label: "step" }, ...shown.map(([run, place]) => ({ label: data.runs.length > 1 ? run.name : name, stroke: COLORS[place % COLORS.length],
    width: 1.5, spanGaps: true, points: { show: run.metrics.step.length < 40 }, value: (_, value) => number(value) }))];
  const ink = getComputedStyle(document.body).color;
  const axis = { stroke: ink, grid: { stroke: "#8883" }, ticks: { stroke: "#8883" } };
  const steps = { ...axis, incrs: STEPS, values: (_, ticks) => ticks.map(String) };
  const values = { ...axis, size: 66, values: (_, ticks, __, ___, apart) => ticks.map((tick) => tick === null ? "" : tickLabel(tick, log ? null : apart)) };
  const options = { width: Math.max(320, box.clientWidth - 12), height: 200, title: name, cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: heightOf } }, axes: [steps, values], series };
  charts.push(new uPlot(options, uPlot.join(tables), box));
}
// A curve that stays at one value lies in the middle, and not in a range that uPlot makes up.
function heightOf(_, least, most) {
  if (least === null) return [0, 1];
  if (least !== most) return uPlot.rangeNum(least, most, 0.1, true);
  const room = Math.abs(least) / 10;
  return least === 0 ? [0, 1] : [least - room, most + room];
}
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
function curves(data) {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== "step").sort();
  const search = control("metric", "metric", make("input", { placeholder: "part of a name" }));
  const all = control("all", `all ${names.length} metrics`, make("input", { type: "checkbox" }));
  const log = control("log", "logarithmic", make("input", { type: "checkbox" }));
  const smooth = control("smooth", "smoothing", choice([["0", "none"], ["0.6", "some"], ["0.9", "much"]]));
  const grid = make("div", { class: "grid", id: "charts" });
  const drawNow = (box) => {
    later.unobserve(box);
    if (box.firstChild) return;
    drawChart(box, box.dataset.name, data, log.firstElementChild.checked, Number(smooth.lastElementChild.value));
    document.documentElement.dataset.charts = charts.length;
  };
  const later = new IntersectionObserver((entries) => entries.forEach((entry) => { if (entry.isIntersecting) drawNow(entry.target); }), { rootMargin: "400px" });
  window.addEventListener("beforeprint", () => [...grid.children].forEach(drawNow));
  const draw = () => {
    charts.splice(0).forEach((chart) => chart.destroy());
    grid.replaceChildren();
    const part = search.lastElementChild.value.toLowerCase();
    const first = FIRST.filter((name) => names.includes(name));
    const wanted = part ? names.filter((name) => name.toLowerCase().includes(part)) : all.firstElementChild.checked || !first.length ? names : first;
    grid.dataset.wanted = wanted.length;
    if (!wanted.length) grid.append("no metric is called like that");
    for (const name of wanted) {
      const box = make("figure", { "data-name": name, tabindex: 0 });
      box.style.minHeight = "260px";
      grid.append(box);
      later.observe(box);
    }
  };
  const bar = make("div", { class: "bar" }, search, all, log, smooth,
    make("button", { onclick: () => charts.forEach((chart) => chart.setData(chart.data, true)) }, "whole range"),
    make("span", { class: "quiet" }, "drag to zoom in, double click to zoom out"));
  bar.addEventListener("change", draw);
  return [make("section", {}, make("h2", { id: "curves" }, "Curves"), bar, grid), draw];
}

const VERDICTS = { ok: () => "ok", warning: (check) => `warning since step ${check.step}`, unknown: () => "not measured" };
function health(data) {
  const names = data.runs.length > 1 ? data.runs.map((run) => run.name) : ["verdict"];
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
  return make("section", {}, make("h2", { id: "health" }, "Health"), make("div", { class: "scroll" }, table));
}
function phases(data) {
  const section = make("section", {}, make("h2", { id: "phases" }, "Time per step"));
  data.runs.forEach((run) => {
    const table = make("table", {}, cells(["phase", "seconds, mean", "share"], true));
    for (const [name, mean, share] of run.phases) {
      const bar = make("span", { class: "share" });
      bar.style.width = `${Math.round(200 * Math.min(1, share || 0))}px`;
      table.append(make("tr", {}, make("td", {}, name), make("td", { class: "number" }, number(mean, 3)), make("td", {}, bar, share === null ? "" : ` ${Math.round(100 * share)} %`)));
    }
    section.append(data.runs.length > 1 ? make("h3", {}, run.name) : "", table);
  });
  return section;
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
  return make("section", {}, make("h2", { id: "starts" }, "Starts"), table);
}

function messages(list) {
  return list.map((message) => make("div", { class: "message " + (message.role === "assistant" ? "assistant" : "") },
    make("div", { class: "role" }, String(message.role || "")), ...shown(message.content)));
}
// Texts and images of a message, in their order.
function shown(content) {
  if (!Array.isArray(content) || !content.some((part) => part && part.type === "image")) return [make("div", { class: "text" }, words(content))];
  return content.map((part) => part && part.type === "image" ? picture(String(part.image)) : make("div", { class: "text" }, words([part])));
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
  if (line.status !== "ok") chips.push(make("span", { class: "chip failed" }, `${line.status}: ${line.reason}`));
  const card = make("article", { class: "sample", "data-place": place }, make("div", {}, chips,
    browser.grouped ? null : make("button", { onclick: () => browser.openGroup(line.step, line.draw) }, "group")));
  // "prompt" is what the last message says: a text, or parts of text and images.
  const prompt = Array.isArray(line.messages) ? line.messages : Array.isArray(line.prompt) ? [{ role: "user", content: line.prompt }] : null;
  if (!line.turns) card.append(...(prompt ? messages(prompt) : [make("div", { class: "text quiet" }, words(line.prompt))]));
  if (line.turns) {
    card.append(...messages(line.opening || []));
    line.turns.forEach((turn, index) => card.append(make("div", { class: "message assistant" }, make("div", { class: "role" }, `turn ${index + 1}, reward ${number(turn.reward)} ${turn.reason || ""}`),
      make("div", { class: "text" }, words(turn.text))), ...messages(turn.messages || [])));
  } else card.append(make("div", { class: "message assistant" }, make("div", { class: "role" }, "response"), make("div", { class: "text" }, words(line.response))));
  if (line.answer !== null && line.answer !== undefined) card.append(make("div", { class: "quiet" }, "answer: " + words(line.answer)));
  if (line.reason && line.status === "ok") card.append(make("div", { class: "quiet" }, line.reason));
  const others = Object.entries(line).filter(([name]) => !TOLD.has(name));
  if (others.length) card.append(make("details", {}, make("summary", {}, "more"), make("div", { class: "text" }, others.map(([name, value]) => `${name}: ${words(value)}`).join("\n"))));
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
    const mine = ++turn, number = chosen(), run = data.runs[number], index = await unpack(`index-${number}`);
    let places = index.step.map((_, place) => place);
    for (const name of ["status", "end", "source"]) {
      const word = value(picks[name]);
      if (word !== "") { const wanted = run.words[name].indexOf(word); places = places.filter((place) => index[name][place] === wanted); }
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
    run.last = run.metrics.step.length ? run.metrics.step[run.metrics.step.length - 1] : 0;
  }));
  const main = document.getElementById("report");
  const [curveSection, draw] = curves(data);
  const follow = data.live ? control("follow", "follow (every 10 s)", make("input", { type: "checkbox" })) : null;
  main.append(make("h1", {}, data.runs.map((run) => run.name).join(", ")),
    make("nav", {}, ["overview", "health", "curves", "samples", "phases", "config", "environment", "starts"].map((name) => make("a", { href: "#", onclick: (event) => { event.preventDefault(); document.getElementById(name).scrollIntoView(); } }, name)), follow),
    overview(data), health(data), curveSection);
  draw();
  main.append(await sampleBrowser(data), phases(data),
    fields(data, "config", "Configuration", (names) => ["field", ...names, "default, where it is another"]),
    fields(data, "environment", "Environment", (names) => ["", ...names]), starts(data));
  main.append(make("p", { class: "quiet" }, "Made by oxrl report. The charts are uPlot's (MIT licence, Leon Sorokin)."));
  document.title = `oxRL: ${data.runs.map((run) => run.name).join(", ")}`;
  if (follow) setInterval(() => { if (follow.firstElementChild.checked) location.reload(); }, 10000);
  document.documentElement.dataset.ready = "true";
}
begin().catch(failed);
