// The status page: polls v1/status once a second and shows it; reports missing answers.

const LATE_S = 4;             // seconds without an answer after which the figures are marked as old
const LONGEST_WAIT_S = 15;    // longest pause between two polls of a service that does not answer
const RATE_S = 10;            // seconds over which rates are shown

const byId = (id) => document.getElementById(id);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const total = (counts) => sum(Object.values(counts));

const page = { answers: [], last: undefined, answeredAt: 0, failures: 0 };

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  // Strings become text nodes: names from clients are never parsed as HTML.
  made.append(...children);
  return made;
}

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
  const before = page.answers[0];
  const time = Math.max(now.uptime_s - before.uptime_s, 0.001);
  const more = (of) => of(now) - of(before);
  const refusals = (answer) => sum(answer.refusals.map((row) => row.refusals));
  const answered = more((answer) => total(answer.answers));
  const computed = more((answer) => answer.answers.computed);
  const refused = more(refusals) / time;
  const ahead = Math.max(0, ...Object.values(now.predicted_s));
  const tiles = [
    ["Answers", count(answered / time), "per second"],
    ["Shared", answered ? percent(1 - computed / answered) : "–", "cached or coalesced"],
    ["Tower", count(more((answer) => answer.tokens) / time), "tokens per second"],
    ["Waiting", count(now.waiting), ahead > 0 ? `${seconds(ahead)} predicted` : "for an answer"],
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
}

// -- asking ---------------------------------------------------------------------------------

function take(now) {
  if (page.last?.instance !== now.instance) page.answers = [];
  page.answers = [...page.answers.filter((answer) => answer.uptime_s > now.uptime_s - RATE_S), now];
  page.last = now;
}

async function ask() {
  let now;
  try {
    const response = await fetch("v1/status", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    now = await response.json();
  } catch {
    page.failures += 1;
    watch();
    return setTimeout(ask, Math.min(2 ** (page.failures - 1), LONGEST_WAIT_S) * 1000);
  }
  take(now);
  page.answeredAt = performance.now();
  page.failures = 0;
  show();
  watch();
  return setTimeout(ask, document.hidden ? 5000 : 1000);
}

// Reports missing answers, and a service that is not serving.
function watch() {
  const alarm = byId("alarm");
  const silent = (performance.now() - page.answeredAt) / 1000;
  const lost = page.failures > 0 && (silent > LATE_S || page.failures > 1);
  alarm.classList.toggle("mild", !lost);
  alarm.hidden = false;
  if (lost) {
    document.body.dataset.state = "lost";
    byId("state").textContent = "no answer";
    document.title = "no answer · cornplug encoder";
    const since = page.answeredAt ? ` for ${duration(silent)}: what you see is old` : "";
    alarm.textContent = `The service does not answer${since}. Trying again.`;
  } else if (page.last?.state === "draining") {
    alarm.textContent = "The service is stopping: it finishes what it has admitted and takes nothing new.";
  } else if (page.last?.state === "down") {
    alarm.textContent = "No executor is alive: requests are refused until one is back. See the service's log.";
  } else {
    alarm.hidden = true;
  }
}

setInterval(watch, 1000);
ask();
