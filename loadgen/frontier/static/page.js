"use strict";
// The page's only state is what its controls say (kept in the address's hash); every change draws everything again.

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const LIGHT = ["#4269d0", "#e8853a", "#3ca951", "#a463f2", "#d6527e", "#26a3a8", "#b59312", "#9c6b4e", "#7f93c4", "#e0705f", "#5b8c3a", "#8a6d9e"];
const DARK = ["#7d9df7", "#f29a56", "#5cc46f", "#bd8bff", "#ec7fa0", "#4cc3c8", "#d8b537", "#c08e70", "#a3b4de", "#ff9686", "#86b864", "#b297c6"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const KEY_FIGURES = ["ttft_p50_s", "ttft_p90_s", "e2e_p90_s", "user_tokens_per_s", "output_per_gpu", "hit_rate", "price_per_million_output", "batch", "busy"];
const MARKED_CLIFFS = 6;
const metricIndex = new Map(data.metrics.map((metric, index) => [metric.key, index]));
const metricOf = (key) => data.metrics[metricIndex.get(key)];
const value = (point, key) => (metricIndex.has(key) ? point.at[metricIndex.get(key)] : null);
data.points.forEach((point, id) => (point.id = id));
let chosenCliff = null;

// ---- words

function number(v) {
  if (v === null || v === undefined) return "-";
  if (v !== 0 && Math.abs(v) < 0.001) return v.toExponential(2);
  if (Math.abs(v) >= 999.5) return Math.round(v).toLocaleString("en-US");
  return String(Number(v.toPrecision(3)));
}
const times = (f) => (f < 9.995 ? f.toFixed(2) : f < 99.95 ? f.toFixed(1) : f.toFixed(0)) + "x";
const plotText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); // plotly reads some HTML in texts
const arrows = (text) => text.replaceAll(" -> ", " \u2192 ");
const setting = (point, axis) => data.axes[axis].values[point.arm[axis]];
const plural = (n, word) => `${n.toLocaleString("en-US")} ${word}${n === 1 ? "" : "s"}`;

/** An element with text, never with HTML: settings come from users. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, v] of Object.entries(attributes)) name === "style" ? (made.style.cssText = v) : made.setAttribute(name, v);
  made.append(...children);
  return made;
}

// ---- the front: the same rule as pareto.py, which a test compares

function front(points, x, y) {
  const sign = (key) => (metricOf(key).higher ? 1 : -1);
  const seen = points
    .filter((p) => value(p, x) !== null && value(p, y) !== null)
    .map((p) => [sign(x) * value(p, x), sign(y) * value(p, y), p])
    .sort((a, b) => b[0] - a[0] || b[1] - a[1] || a[2].id - b[2].id);
  const kept = [];
  for (const one of seen) {
    const last = kept[kept.length - 1];
    if (!last || one[1] > last[1] || (one[0] === last[0] && one[1] === last[1])) kept.push(one);
  }
  const found = kept.map((one) => one[2]);
  return metricOf(x).higher ? found.reverse() : found;
}

// ---- objectives

function parseObjectives(text) {
  return text.split(/[,;\n]/).map((part) => part.trim()).filter(Boolean).map((part) => {
    const match = /^([a-z0-9_]+)\s*(<=|>=)\s*(\S+)$/i.exec(part);
    if (!match || !Number.isFinite(Number(match[3]))) throw new Error(`${part} is not an objective; write e.g. ttft_p90_s<=5`);
    if (!metricIndex.has(match[1])) throw new Error(`no run has a figure ${match[1]}; there are ${data.metrics.map((m) => m.key).join(", ")}`);
    return { key: match[1], below: match[2] === "<=", bound: Number(match[3]), text: `${match[1]}${match[2]}${match[3]}` };
  });
}
const broken = (point, objectives) => objectives.filter((o) => {
  const v = value(point, o.key);
  return v === null || (o.below ? v > o.bound : v < o.bound);
});

// ---- controls and the hash

function fill(select, options, chosen) {
  for (const [key, label] of options) select.append(new Option(label, key, false, key === chosen));
}
const CHECKS = { dominated: true, failing: true, "cliff-marks": true, spread: false };

function setUp() {
  const hash = new URLSearchParams(location.hash.slice(1));
  const axes = data.metrics.filter((metric) => metric.axis).map((metric) => [metric.key, metric.label]);
  fill(at("x"), axes, hash.get("x") ?? data.x);
  fill(at("y"), axes, hash.get("y") ?? data.y);
  const configuration = data.axes.map((axis) => [axis.key, axis.name]);
  fill(at("series"), [["", "one colour"], ...configuration], hash.get("series") ?? data.series ?? "");
  const joined = data.axes.filter((axis) => axis.lines.length).map((axis) => [axis.key, axis.name]);
  fill(at("along"), [["", "nothing"], ...joined], hash.get("along") ?? data.along ?? "");
  at("objectives").value = hash.get("slo") ?? data.objectives.join(", ");
  for (const [id, standard] of Object.entries(CHECKS)) at(id).checked = hash.has(id) ? hash.get(id) === "1" : standard;
  for (const id of ["x", "y"]) at(`log-${id}`).checked = hash.has(`log-${id}`) ? hash.get(`log-${id}`) === "1" : wantsLog(at(id).value);
  at("x").addEventListener("change", () => { at("log-x").checked = wantsLog(at("x").value); });
  at("y").addEventListener("change", () => { at("log-y").checked = wantsLog(at("y").value); });
  at("swap").addEventListener("click", () => {
    [at("x").value, at("y").value] = [at("y").value, at("x").value];
    [at("log-x").checked, at("log-y").checked] = [at("log-y").checked, at("log-x").checked];
    draw();
  });
  at("controls").addEventListener("change", draw);
  at("controls").addEventListener("submit", (event) => { event.preventDefault(); draw(); });
  dark.addEventListener("change", draw);
}

/** Latencies and prices span decades near a cliff. */
function wantsLog(key) {
  const seen = data.points.map((p) => value(p, key)).filter((v) => v !== null);
  return seen.length > 0 && !metricOf(key).higher && Math.min(...seen) > 0 && Math.max(...seen) / Math.min(...seen) > 20;
}

function remember() {
  const hash = new URLSearchParams({ x: at("x").value, y: at("y").value, series: at("series").value, along: at("along").value });
  if (at("objectives").value !== data.objectives.join(", ")) hash.set("slo", at("objectives").value);
  for (const [id, standard] of Object.entries(CHECKS)) if (at(id).checked !== standard) hash.set(id, at(id).checked ? "1" : "0");
  for (const id of ["x", "y"]) if (at(`log-${id}`).checked !== wantsLog(at(id).value)) hash.set(`log-${id}`, at(`log-${id}`).checked ? "1" : "0");
  try { history.replaceState(null, "", `#${hash}`); } catch { /* not allowed where the page is embedded */ }
}

// ---- drawing

function draw() {
  let objectives;
  try {
    objectives = parseObjectives(at("objectives").value);
    at("problem").textContent = "";
  } catch (error) {
    at("problem").textContent = error.message;
    return;
  }
  const x = at("x").value, y = at("y").value;
  const seriesAxis = data.axes.findIndex((axis) => axis.key === at("series").value);
  const fails = data.points.map((point) => broken(point, objectives));
  const keeping = data.points.filter((point) => !fails[point.id].length);
  const values = seriesAxis < 0 ? ["all"] : data.axes[seriesAxis].values;
  const series = values.map((name, index) => ({
    name, colour: (dark.matches ? DARK : LIGHT)[index % LIGHT.length], points: data.points.filter((p) => seriesAxis < 0 || p.arm[seriesAxis] === index),
  }));
  for (const one of series) one.front = front(one.points.filter((p) => !fails[p.id].length), x, y);
  const view = {
    x, y, objectives, fails, keeping, series, seriesAxis, within: front(keeping, x, y), all: front(data.points, x, y),
    colour: (point) => series[seriesAxis < 0 ? 0 : point.arm[seriesAxis]].colour,
  };
  remember();
  drawTiles(view);
  drawChart(view);
  const present = { objectives: objectives.length > 0, along: at("along").value !== "", cliffs: data.cliffs.length > 0 && at("cliff-marks").checked };
  for (const item of document.querySelectorAll("[data-with]")) item.hidden = !present[item.dataset.with];
  at("along-name").textContent = data.axes.find((axis) => axis.key === at("along").value)?.name ?? "";
  drawTable(view);
}

function hover(point, view) {
  const lines = data.axes.map((axis, index) => `${plotText(axis.name)} <b>${plotText(setting(point, index))}</b>`);
  const figures = [...new Set([view.x, view.y, ...KEY_FIGURES])].filter((key) => value(point, key) !== null);
  lines.push("", ...figures.map((key) => {
    const spread = point.spread[metricIndex.get(key)];
    return `${plotText(metricOf(key).label)} <b>${number(value(point, key))}</b>` + (spread ? ` (${number(spread[0])} to ${number(spread[1])})` : "");
  }));
  lines.push(`${plural(point.gpus, "GPU")}, ${plural(point.seeds, "run")}`);
  for (const objective of view.fails[point.id]) lines.push(`breaks <b>${plotText(objective.text)}</b>`);
  return lines.join("<br>");
}

function drawChart(view) {
  const css = getComputedStyle(document.documentElement);
  const ink = (name) => css.getPropertyValue(`--${name}`).trim();
  const { x, y, fails } = view;
  const shape = metricOf(x).higher ? "vh" : "hv";
  const xs = (points) => points.map((p) => value(p, x)), ys = (points) => points.map((p) => value(p, y));
  const traces = [];
  const line = (points, style, more = {}) => ({ x: xs(points), y: ys(points), mode: "lines", line: style, hoverinfo: "skip", showlegend: false, ...more });
  const marks = (points, marker, more = {}) => ({
    x: xs(points), y: ys(points), mode: "markers", marker, text: points.map((p) => hover(p, view)), hovertemplate: "%{text}<extra></extra>",
    hoverlabel: { align: "left" }, showlegend: false, ...more,
  });
  const axis = data.axes.find((one) => one.key === at("along").value);
  if (axis) {
    const standing = new Set(view.series.flatMap((one) => one.front));
    const lines = axis.lines.map((ids) => ids.map((id) => data.points[id]).filter(visible)).filter((points) => points.length > 1);
    for (const one of view.series) {
      for (const through of [false, true]) {
        // lines of one kind are one trace, with gaps; those that no front point is on stay in the background
        const own = lines.filter((points) => view.colour(points[0]) === one.colour && points.some((p) => standing.has(p)) === through);
        const joined = own.flatMap((points) => [...points, null]);
        traces.push({
          x: joined.map((p) => (p ? value(p, x) : null)), y: joined.map((p) => (p ? value(p, y) : null)), mode: "lines", name: "join",
          line: { width: 1.1, color: one.colour }, opacity: through ? (data.points.length > 1000 ? 0.3 : 0.5) : lines.length > 12 ? 0.1 : 0.3, hoverinfo: "skip", showlegend: false,
          connectgaps: false, legendgroup: one.name,
        });
      }
    }
  }
  function visible(point) {
    return fails[point.id].length ? at("failing").checked : true;
  }
  if (at("failing").checked) {
    traces.push(marks(data.points.filter((p) => fails[p.id].length), { symbol: "x-thin", size: 6, line: { width: 1.2, color: ink("faint") } }, { name: "failing", opacity: 0.55 }));
  }
  for (const one of view.series) {
    const onFront = new Set(one.front);
    const rest = one.points.filter((p) => !fails[p.id].length && !onFront.has(p));
    if (at("dominated").checked) traces.push(marks(rest, { size: 5.5, color: one.colour, opacity: 0.38 }, { name: "dominated", legendgroup: one.name }));
  }
  if (view.objectives.length) traces.push(line(view.all, { shape, width: 1.5, dash: "dash", color: ink("faint") }, { name: "front of all" }));
  for (const one of view.series) {
    if (view.series.length > 1) traces.push(line(one.front, { shape, width: 1.6, color: one.colour }, { name: "front of series", legendgroup: one.name }));
  }
  traces.push(line(view.within, { shape, width: 3, color: ink("ink") }, { name: "envelope", opacity: 0.85 }));
  for (const one of view.series) {
    const spread = (key) => {
      if (!at("spread").checked) return undefined;
      const ends = one.front.map((p) => p.spread[metricIndex.get(key)] ?? [value(p, key), value(p, key)]);
      return {
        type: "data", symmetric: false, thickness: 1.2, width: 3, color: one.colour,
        array: one.front.map((p, i) => ends[i][1] - value(p, key)), arrayminus: one.front.map((p, i) => value(p, key) - ends[i][0]),
      };
    };
    traces.push(marks(one.front, { size: 10, color: one.colour, line: { width: 1.5, color: ink("card") } }, {
      name: plotText(one.name), legendgroup: one.name, showlegend: view.series.length > 1, error_x: spread(x), error_y: spread(y), meta: "front",
    }));
  }
  const logX = at("log-x").checked, logY = at("log-y").checked;
  const place = (v, log) => (log ? Math.log10(v) : v);
  const annotations = [];
  const badges = new Map(); // cliffs that start at one point have their numbers side by side
  const marked = at("cliff-marks").checked ? data.cliffs.map((_, index) => index).filter((index) => index < MARKED_CLIFFS) : [];
  if (chosenCliff !== null && !marked.includes(chosenCliff)) marked.push(chosenCliff);
  for (const index of marked) {
    const cliff = data.cliffs[index];
    const [from, to] = [data.points[cliff.before], data.points[cliff.after]];
    const ends = [value(from, x), value(from, y), value(to, x), value(to, y)];
    if (ends.some((v) => v === null) || (logX && (ends[0] <= 0 || ends[2] <= 0)) || (logY && (ends[1] <= 0 || ends[3] <= 0))) continue;
    const beside = badges.get(cliff.before) ?? 0;
    badges.set(cliff.before, beside + 1);
    const strong = chosenCliff === null || chosenCliff === index;
    const label = index === chosenCliff ? `${index + 1}: ${plotText(arrows(cliff.step))}<br>${plotText(cliff.cause)}` : String(index + 1);
    annotations.push({
      x: place(ends[2], logX), y: place(ends[3], logY), ax: place(ends[0], logX), ay: place(ends[1], logY), xref: "x", yref: "y", axref: "x", ayref: "y",
      showarrow: true, arrowhead: 2, arrowsize: 0.9, arrowwidth: index === chosenCliff ? 3 : 1.8, arrowcolor: ink("bad"), opacity: strong ? 0.95 : 0.25,
      text: "", standoff: 4, startstandoff: 6,
    }, {
      x: place(ends[0], logX), y: place(ends[1], logY), xref: "x", yref: "y", showarrow: false, text: label, xshift: 13 + 17 * beside, yshift: 13, align: "left",
      xanchor: index === chosenCliff ? "left" : "center",
      font: { size: 11, color: ink("card") }, bgcolor: ink("bad"), borderpad: 2.5, opacity: strong ? 1 : 0.25,
    });
  }
  const better = (key) => (metricOf(key).higher ? "more is better" : "less is better");
  const axisLayout = (key, log) => ({
    title: { text: `${plotText(metricOf(key).label)} <span style="font-size:11px">(${better(key)})</span>`, standoff: 8 }, type: log ? "log" : "linear",
    gridcolor: ink("grid"), linecolor: ink("line"), zerolinecolor: ink("line"), rangemode: log ? "normal" : "tozero", automargin: true,
    ...(log ? logTicks(key) : { separatethousands: true, exponentformat: "none" }),
  });
  const many = view.series.length > 1;
  Plotly.react(at("chart"), traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink("ink"), family: getComputedStyle(document.body).fontFamily, size: 13 },
    margin: { l: 60, r: 16, t: many ? 8 : 16, b: 50 }, xaxis: axisLayout(x, logX), yaxis: axisLayout(y, logY), annotations, hovermode: "closest",
    hoverlabel: { bgcolor: ink("card"), bordercolor: ink("line"), font: { color: ink("ink"), size: 12 } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", title: many ? { text: `${plotText(data.axes[view.seriesAxis].name)}  ` } : undefined },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("faint"), activecolor: ink("ink") },
    uirevision: `${x} ${y} ${logX} ${logY}`,
  }, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
}

/** 1, 2 and 5 of each decade, or the decades alone where there are many. */
function logTicks(key) {
  const seen = data.points.map((p) => value(p, key)).filter((v) => v > 0);
  const first = Math.floor(Math.log10(Math.min(...seen))), last = Math.ceil(Math.log10(Math.max(...seen)));
  const tickvals = [];
  for (let decade = first; decade <= last; decade++) for (const digit of last - first > 4 ? [1] : [1, 2, 5]) tickvals.push(digit * 10 ** decade);
  return { tickvals, ticktext: tickvals.map((v) => Number(v.toPrecision(1)).toLocaleString("en-US", { maximumFractionDigits: 9 })) };
}

function drawTiles(view) {
  const tile = (name, figure, text, kind = "") => element("div", { class: `tile ${kind}` }, element("small", {}, name), element("b", {}, figure), element("span", {}, text));
  const tiles = [];
  const count = data.points.length;
  const y = metricOf(view.y), x = metricOf(view.x);
  const best = view.within.reduce((a, b) => (a === null || (value(b, view.y) > value(a, view.y)) === y.higher ? b : a), null);
  const kept = view.objectives.length ? "within objectives" : "of all";
  tiles.push(best
    ? tile(`${y.higher ? "Most" : "Least"} ${y.label}, ${kept}`, number(value(best, view.y)), `at ${number(value(best, view.x))} ${x.label}: ${arm(best)}`)
    : tile("Within objectives", "none", "no configuration keeps every objective", "bad"));
  tiles.push(tile("On the front", String(view.within.length), `of ${plural(count, "configuration")}`));
  if (view.objectives.length) tiles.push(tile("Keep the objectives", `${view.keeping.length}`, view.objectives.map((o) => o.text).join(", ")));
  if (data.cliffs.length) {
    const cliff = data.cliffs[0];
    tiles.push(tile(cliff.beside ? "Steepest cliff beside the front" : "Steepest cliff", `${times(cliff.factor)} worse`, `${cliff.changes[0][0]} at ${arrows(cliff.step)}: ${cliff.cause}`, "bad"));
  }
  if (data.expansion) tiles.push(tile("Over the baseline", times(data.expansion.total), data.expansion.label));
  at("tiles").replaceChildren(...tiles);
}
const arm = (point) => data.axes.map((axis, index) => `${axis.name} ${setting(point, index)}`).join(", ") || "the only configuration";

function drawTable(view) {
  const keys = [...new Set([view.x, view.y, ...KEY_FIGURES])].filter((key) => metricIndex.has(key));
  const head = element("tr", {}, ...data.axes.map((axis) => element("th", {}, axis.name)), ...keys.map((key) => element("th", { class: "figure" }, metricOf(key).label)));
  const shown = [...new Set([...view.within, ...view.all])].sort((a, b) => value(a, view.x) - value(b, view.x));
  const breaks = shown.some((point) => view.fails[point.id].length);
  if (breaks) head.append(element("th", {}, "breaks"));
  const rows = shown.map((point) => {
    const cells = data.axes.map((_, index) => element("td", {}, setting(point, index)));
    cells[0]?.prepend(element("i", { style: `background:${view.colour(point)}` }));
    cells.push(...keys.map((key) => element("td", { class: "figure" }, number(value(point, key)))));
    if (breaks) cells.push(element("td", {}, view.fails[point.id].map((o) => o.text).join(", ")));
    return element("tr", { class: view.fails[point.id].length ? "failing" : "" }, ...cells);
  });
  at("front").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

function listCliffs() {
  if (!data.cliffs.length) {
    at("cliffs").replaceWith(element("p", { class: "none" }, "None: no step to a neighbour costs more than the limit, or no two runs are neighbours."));
    return;
  }
  const choose = (index) => {
    chosenCliff = chosenCliff === index ? null : index;
    [...at("cliffs").children].forEach((item, place) => item.classList.toggle("chosen", place === chosenCliff));
    draw();
  };
  at("cliffs").append(...data.cliffs.map((cliff, index) => {
    const likewise = cliff.likewise ? `; and ${cliff.likewise} more alike` : "";
    const item = element("li", { tabindex: "0" },
      element("span", { class: "badge" }, String(index + 1)),
      element("span", { class: "step" }, `${arrows(cliff.step)}: `, element("em", {}, cliff.cause)),
      element("span", { class: "worse" }, times(cliff.factor)),
      element("span", { class: "text" }, cliff.changes.map(([label, before, after]) => `${label} ${before} \u2192 ${after}`).join("; ") + `. ${arrows(cliff.text[0].toUpperCase() + cliff.text.slice(1))}`),
      element("span", { class: "where" }, (cliff.beside ? "beside the front: " : "") + cliff.where + likewise));
    item.addEventListener("click", () => choose(index));
    item.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(index); });
    return item;
  }));
}

/** Bars on a logarithmic scale: equal factors are equally long, and lengths add up to the total. */
function showExpansion() {
  const found = data.expansion;
  if (!found) {
    at("expansion-card").remove();
    document.querySelector(".columns").classList.add("one");
    return;
  }
  const logs = found.factors.map((factor) => Math.log(factor.value));
  let low = 0, high = 0, sum = 0;
  for (const one of logs) { sum += one; low = Math.min(low, sum); high = Math.max(high, sum); }
  const width = high - low || 1;
  const percent = (v) => `${(100 * (v - low)) / width}%`;
  const row = (name, changes, from, to, text, range, kind) => element("div", { class: "factor" },
    element("span", { class: "name" }, name, element("small", {}, changes)),
    element("span", { class: "track" }, element("span", { class: `bar ${kind}`, style: `left:${percent(Math.min(from, to))};width:calc(${percent(Math.max(from, to))} - ${percent(Math.min(from, to))})` })),
    element("span", { class: "value" }, text, element("small", {}, range)));
  let reached = 0;
  const rows = found.factors.map((factor, index) => {
    const range = factor.high / factor.low < 1.005 ? "" : `${times(factor.low)} to ${times(factor.high)}`;
    const made = row(factor.name, arrows(factor.changes), reached, reached + logs[index], times(factor.value), range, logs[index] < 0 ? "loss" : "");
    reached += logs[index];
    return made;
  });
  rows.push(row("total", `${found.from} \u2192 ${found.to}`, 0, reached, times(found.total), "", "total"));
  const product = element("p", { class: "product" }, element("b", {}, found.label), `: ${found.factors.map((f) => times(f.value)).join(" × ") || "no group differs"} = `, element("b", {}, times(found.total)));
  const ends = element("p", { class: "note" }, `From ${arm(data.points[found.baseline])} to ${arm(data.points[found.best])}.`);
  at("expansion").append(product, ...rows, ends);
  if (found.note) at("expansion").append(element("p", { class: "note" }, found.note));
}

function listFailed() {
  if (!data.failed.length) return at("failed-card").remove();
  at("failed-card").querySelector("summary").textContent = `${plural(data.failed.length, "run")} without figures`;
  at("failed").append(...data.failed.map(([what, why]) => element("tr", {}, element("td", {}, what), element("td", {}, why))));
}

at("meta").textContent = [
  plural(data.points.length, "configuration"), `${plural(data.runs, "run")} (seeds: ${data.seeds})`, data.sources.join(" and "), data.date,
].filter(Boolean).join(" · ");
at("constant").textContent = data.constant.length ? `All with ${data.constant.map((pair) => pair.join(" ")).join(", ")}` : "";
setUp();
listCliffs();
showExpansion();
listFailed();
draw();
