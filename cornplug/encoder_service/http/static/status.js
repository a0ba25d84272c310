// The status page: polls v1/status once a second and shows it; reports missing answers.

import { Plot, element } from "./plots.js";

const LATE_S = 4;             // seconds without an answer after which the figures are marked as old
const LONGEST_WAIT_S = 15;    // longest pause between two polls of a service that does not answer
const KEPT_S = 15 * 60;
const ORIGINS = [["computed", 0], ["coalesced", 1], ["cached", 2]];

const byId = (id) => document.getElementById(id);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const total = (counts) => sum(Object.values(counts));

const page = { samples: [], last: undefined, answeredAt: 0, failures: 0, minutes: 5 };

// -- numbers as text ------------------------------------------------------------------------

function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(0)}k`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
  return String(Number(value.toFixed(value >= 100 ? 0 : value >= 1 ? 1 : 2)));
}

function seconds(value) {
  if (value === 0) return "0";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

function duration(value) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => value >= size);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([size, unit], i) =>
    `${Math.floor((i ? value % parts[first][0] : value) / size)} ${unit}`).join(" ");
}

const percent = (part) => `${(part * 100).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;

// -- values that the plots show for a group of samples ---------------------------------------------

const time = (bin) => sum(bin.map((s) => s.seconds));
const rate = (bin, of) => sum(bin.map(of)) / time(bin);
const largest = (bin, of) => Math.max(...bin.map(of));
const known = (bin, of) => bin.map(of).filter((v) => v !== null);
const keyed = (keys, of) => Object.fromEntries(keys.map((key) => [key, of(key)]));

const plots = [];

function makePlots(classes) {
  byId("plots").replaceChildren();
  plots.length = 0;
  const add = (options) => plots.push(new Plot(byId("plots"), options));
  // A single class needs no name.
  const ofClass = classes.map((key, i) => ({ key, label: classes.length > 1 ? key : "requests", colour: i % 6 }));
  const origins = ORIGINS.map(([key, colour]) => ({ key, label: key, colour }));
  add({
    title: "Requests", unit: "per second", stacked: true, format: count,
    series: [...origins, { key: "refused", label: "refused", colour: 3 }],
    read: (bin) => ({
      ...keyed(ORIGINS.map(([key]) => key), (key) => rate(bin, (s) => s.answers[key] ?? 0)),
      refused: rate(bin, (s) => total(s.refusals)),
    }),
  });
  add({
    title: "Latency", unit: "receipt to answer", format: seconds,
    series: [{ key: "p50", label: "p50", colour: 1 }, { key: "p95", label: "p95", colour: 4 }],
    read: (bin) => {
      const half = known(bin, (s) => s.p50_s).sort((a, b) => a - b);
      const high = known(bin, (s) => s.p95_s);
      return { p50: half[half.length >> 1] ?? null, p95: high.length ? Math.max(...high) : null };
    },
  });
  add({
    title: "Shared", unit: "of the answers", format: percent,
    series: [{ key: "shared", label: "shared", colour: 2 }],
    read: (bin) => {
      const all = sum(bin.map((s) => total(s.answers)));
      return { shared: all ? 1 - sum(bin.map((s) => s.answers.computed ?? 0)) / all : null };
    },
  });
  add({
    title: "Queue", unit: "requests waiting for a batch", stacked: true, format: count, series: ofClass,
    read: (bin) => keyed(classes, (key) => largest(bin, (s) => s.queue[key] ?? 0)),
  });
  add({
    title: "Tower", unit: "tokens per second", stacked: true, format: count,
    series: [{ key: "tokens", label: "tokens/s", colour: 0 }],
    read: (bin) => ({ tokens: rate(bin, (s) => s.tokens) }),
  });
  add({
    title: "Batch", unit: "media in a batch", format: count,
    series: [{ key: "media", label: "mean", colour: 0 }],
    read: (bin) => {
      const batches = sum(bin.map((s) => s.batches));
      return { media: batches ? sum(bin.map((s) => s.media)) / batches : null };
    },
  });
  add({
    title: "Executors", unit: "part of the time busy", format: percent,
    series: [{ key: "busy", label: "busy", colour: 1 }],
    read: (bin) => ({ busy: rate(bin, (s) => s.busy_s) / Math.max(page.last.executors.total, 1) }),
  });
  add({
    title: "Refused", unit: "per second", stacked: true, format: count, series: ofClass,
    read: (bin) => keyed(classes, (key) => rate(bin, (s) => s.refusals[key] ?? 0)),
  });
  add({
    title: "Store", unit: "failed calls per second", stacked: true, format: count,
    series: [{ key: "failures", label: "failures", colour: 3 }],
    read: (bin) => ({ failures: rate(bin, (s) => s.store_failures) }),
  });
}

// -- the parts of the page ------------------------------------------------------------------

function showFacts(now) {
  const { alive, total: all } = now.executors;
  const facts = {
    version: now.version,
    up: duration(now.uptime_s),
    [all === 1 ? "executor" : "executors"]: `${alive} of ${all} alive`,
    store: now.store ? "attached" : "none",
    answered: count(total(now.answers)),
  };
  byId("facts").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function showTiles(now) {
  const recent = page.samples.filter((s) => s.at_s > now.now_s - 10.5);
  const over = (of) => (recent.length ? sum(recent.map(of)) / time(recent) : 0);
  const answered = sum(recent.map((s) => total(s.answers)));
  const shared = answered ? percent(1 - sum(recent.map((s) => s.answers.computed ?? 0)) / answered) : "–";
  const slow = known(recent, (s) => s.p95_s);
  const refused = over((s) => total(s.refusals));
  const waiting = recent.length ? recent[recent.length - 1].waiting : 0;
  const ahead = Math.max(0, ...Object.values(now.predicted_s));
  const tiles = [
    ["Answers", `${count(over((s) => total(s.answers)))}`, "per second"],
    ["Shared", shared, "cached or coalesced"],
    ["p95", slow.length ? seconds(Math.max(...slow)) : "–", "receipt to answer"],
    ["Tower", count(over((s) => s.tokens)), "tokens per second"],
    ["Waiting", count(waiting), ahead > 0 ? `${seconds(ahead)} predicted` : "for an answer"],
    ["Refused", count(refused), "per second", refused > 0 ? "bad" : ""],
  ];
  byId("tiles").replaceChildren(...tiles.map(([label, value, what, className = ""]) =>
    element("div", { className }, element("span", {}, label), element("strong", {}, value), element("span", {}, what))));
}

function showModels(models) {
  const towers = [...new Set(models.map((m) => m.tower_fp))];
  byId("models").tBodies[0].replaceChildren(...models.map((m) => {
    const place = towers.indexOf(m.tower_fp);
    const users = models.filter((other) => other.tower_fp === m.tower_fp).length;
    const tower = element("span", { className: `tower mono c${place % 6}`, title: m.tower_fp }, m.tower_fp.slice(0, 12));
    if (users > 1) tower.append(element("span", { className: "shared" }, `shared by ${users}`));
    const short = (digest) => element("code", { title: digest }, digest.slice(0, 12));
    const name = m.name.split("/").filter(Boolean).slice(-2).join("/");
    const label = element("span", { title: m.name }, name);
    if (m.epoch) label.append(" ", element("span", { className: "shared" }, `reloaded ${m.epoch}×`));
    const cells = [label, m.family, m.modalities.join(", "), tower,
      short(m.projector_fp), short(m.identity), String(m.hidden_size), m.dtype];
    return element("tr", {}, ...cells.map((cell, i) => element("td", { className: i === 6 ? "number" : "" }, cell)));
  }));
}

function showBars(id, rows, colour, none) {
  const most = Math.max(1, ...rows.map(([, value]) => value));
  byId(id).replaceChildren(...rows.map(([label, value]) => {
    const bar = element("i", { className: `c${colour}` });
    bar.style.width = `${(value / most) * 100}%`;
    return element("li", {}, element("span", { title: label }, label), bar, element("b", {}, count(value)));
  }));
  if (!rows.length) byId(id).append(element("li", { className: "empty" }, none));
}

function show() {
  const now = page.last;
  document.body.dataset.state = now.state;
  byId("state").textContent = now.state;
  document.title = `${now.state} · cornplug encoder`;
  showFacts(now);
  showTiles(now);
  showModels(now.models);
  showBars("apps", now.apps.map((a) => [a.app, a.answers]), 0, "Nothing was answered yet.");
  const refusals = now.refusals.map((r) => [`${r.qos}: ${r.reason}`, r.refusals]).sort((a, b) => b[1] - a[1]);
  showBars("refusals", refusals, 3, "Nothing was refused.");
  showPlots();
}

function showPlots() {
  const span = page.minutes * 60;
  const samples = page.samples.filter((s) => s.at_s > page.last.now_s - span);
  for (const plot of plots) plot.show(samples, page.last.now_s, span);
}

// -- asking ---------------------------------------------------------------------------------

function take(now) {
  const before = page.last;
  // Five minutes of a service that is up for one would be an empty plot.
  if (!before && now.uptime_s < 120) choose(1);
  if (before?.instance !== now.instance || before.classes.join() !== now.classes.join()) {
    page.samples = [];
    makePlots(now.classes);
  }
  const seen = lastSeq();
  page.samples.push(...now.samples.filter((s) => s.seq > seen));
  page.samples = page.samples.filter((s) => s.at_s > now.now_s - KEPT_S);
  page.last = now;
}

const lastSeq = () => page.samples[page.samples.length - 1]?.seq ?? 0;

async function ask() {
  let now;
  try {
    const response = await fetch(`v1/status?since=${lastSeq()}`, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    now = await response.json();
  } catch {
    page.failures += 1;
    watch();
    return setTimeout(ask, Math.min(2 ** (page.failures - 1), LONGEST_WAIT_S) * 1000);
  }
  const restarted = page.last && page.last.instance !== now.instance;
  take(now);
  page.answeredAt = performance.now();
  page.failures = 0;
  show();
  watch();
  // After a restart sample numbers begin anew: ask for all of them.
  return setTimeout(ask, restarted ? 0 : document.hidden ? 5000 : 1000);
}

// Reports missing answers, and answers without new samples.
function watch() {
  const alarm = byId("alarm");
  const silent = (performance.now() - page.answeredAt) / 1000;
  const newest = page.samples[page.samples.length - 1]?.at_s;
  const still = page.last && newest !== undefined ? page.last.now_s - newest : 0;
  const lost = page.failures > 0 && (silent > LATE_S || page.failures > 1);
  alarm.classList.toggle("mild", !lost);
  alarm.hidden = false;
  if (lost) {
    document.body.dataset.state = "lost";
    byId("state").textContent = "no answer";
    document.title = "no answer · cornplug encoder";
    const since = page.answeredAt ? ` for ${duration(silent)}: what you see is old` : "";
    alarm.textContent = `The service does not answer${since}. Trying again.`;
  } else if (still > LATE_S) {
    alarm.textContent = `The service answers, but its figures are ${duration(still)} old: it is overloaded.`;
  } else if (page.last?.state === "draining") {
    alarm.textContent = "The service is stopping: it finishes what it has admitted and takes nothing new.";
  } else if (page.last?.state === "down") {
    alarm.textContent = "No executor is alive: requests are refused until one is back. See the service's log.";
  } else {
    alarm.hidden = true;
  }
}

function choose(minutes) {
  page.minutes = minutes;
  for (const button of byId("ranges").children) {
    button.setAttribute("aria-pressed", button.dataset.minutes === String(minutes));
  }
  if (page.last) showPlots();
}

byId("ranges").addEventListener("click", (event) => {
  if (event.target.dataset.minutes) choose(Number(event.target.dataset.minutes));
});
addEventListener("resize", () => { if (page.last) showPlots(); });
setInterval(watch, 1000);
ask();
