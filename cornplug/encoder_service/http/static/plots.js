// One plot over time: lines or a stack, as SVG. Independent of the data shown.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20, HEIGHT = 150;
const MOST_POINTS = 240;

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  // Strings become text nodes: names from clients are never parsed as HTML.
  made.append(...children);
  return made;
}

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The smallest of 1, 2, 5 times a power of ten that is not below `value`.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= value * 0.999999);
}

// At most MOST_POINTS groups of neighbours.
export function binned(samples) {
  const size = Math.max(1, Math.ceil(samples.length / MOST_POINTS));
  if (size === 1) return samples.map((sample) => [sample]);
  // Bins begin at fixed numbers, so that a bin does not change when the next second comes.
  const bins = new Map();
  for (const sample of samples) {
    const bin = Math.floor(sample.seq / size);
    if (!bins.has(bin)) bins.set(bin, []);
    bins.get(bin).push(sample);
  }
  return [...bins.values()];
}

export class Plot {
  // read(bin) gives {key: number or null}; `series` is [{key, label, colour: 0..5}], or a function of it.
  constructor(into, { title, unit, series, read, format, stacked = false }) {
    Object.assign(this, { unit, read, format, stacked });
    this.series = series;
    this.keys = element("div", { className: "keys" });
    const caption = element("strong", {}, title, element("span", { className: "unit" }, unit));
    this.canvas = svg("svg", { role: "img", "aria-label": `${title}, ${unit}` });
    into.append(element("figure", {}, element("figcaption", {}, caption, this.keys), this.canvas));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.at = undefined; this.draw(); });
    this.points = [];
  }

  show(samples, now, seconds) {
    this.now = now;
    this.seconds = seconds;
    this.points = binned(samples).map((bin) => ({ at: bin[bin.length - 1].at_s, values: this.read(bin) }));
    this.draw();
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const wanted = this.timeOf(event.clientX - box.left);
    const apart = (p) => Math.abs(p.at - wanted);
    this.at = this.points.reduce((best, p) => (best && apart(best) <= apart(p) ? best : p), undefined)?.at;
    this.draw();
  }

  get width() { return Math.max(this.canvas.clientWidth, 120); }
  x(at) { return LEFT + (1 - (this.now - at) / this.seconds) * (this.width - LEFT - RIGHT); }
  timeOf(x) { return this.now - (1 - (x - LEFT) / (this.width - LEFT - RIGHT)) * this.seconds; }
  y(value) { return TOP + (1 - value / this.top) * (HEIGHT - TOP - BOTTOM); }

  draw() {
    const sum = (p) => this.series.reduce((all, s) => all + (p.values[s.key] ?? 0), 0);
    const most = (p) => Math.max(0, ...this.series.map((s) => p.values[s.key] ?? 0));
    this.top = ceiling(Math.max(0, ...this.points.map(this.stacked ? sum : most)));
    this.canvas.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.canvas.replaceChildren(...this.axes(), ...(this.stacked ? this.stack() : this.lines()));
    const chosen = this.points.find((p) => p.at === this.at);
    if (chosen) {
      const x = this.x(chosen.at);
      this.canvas.append(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.legend(chosen ?? this.points[this.points.length - 1]);
  }

  *axes() {
    for (const part of [0, 0.5, 1]) {
      const y = this.y(part * this.top);
      yield svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
      yield svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.format(part * this.top));
    }
    const minutes = this.seconds / 60;
    const marks = minutes === 1 ? [[60, "−60 s"], [30, "−30 s"]] : [[this.seconds, `−${minutes} min`]];
    for (const [ago, label] of marks) {
      const anchor = ago === this.seconds ? "start" : "middle";
      yield svg("text", { x: this.x(this.now - ago), y: HEIGHT - 5, "text-anchor": anchor }, label);
    }
    const last = this.at === undefined ? "now" : new Date(this.at * 1000).toLocaleTimeString();
    yield svg("text", { x: this.width - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, last);
  }

  lines() {
    return this.series.flatMap((s) => {
      let path = "", open = false, alone = [];
      this.points.forEach((p, i) => {
        const value = p.values[s.key];
        const known = value !== null && value !== undefined;
        if (known) path += `${open ? "L" : "M"}${this.x(p.at).toFixed(1)},${this.y(value).toFixed(1)}`;
        const next = this.points[i + 1]?.values[s.key];
        if (known && !open && (next === null || next === undefined)) alone.push([p.at, value]);
        open = known;
      });
      const dots = alone.map(([at, value]) =>
        svg("circle", { class: `dot c${s.colour}`, cx: this.x(at), cy: this.y(value), r: 2 }));
      return [svg("path", { class: `line c${s.colour}`, d: path }), ...dots];
    });
  }

  stack() {
    const below = this.points.map(() => 0);
    return this.series.map((s) => {
      const low = this.points.map((p, i) => `${this.x(p.at).toFixed(1)},${this.y(below[i]).toFixed(1)}`);
      this.points.forEach((p, i) => { below[i] += p.values[s.key] ?? 0; });
      const high = this.points.map((p, i) => `${this.x(p.at).toFixed(1)},${this.y(below[i]).toFixed(1)}`);
      const d = high.length > 1 ? `M${high.join("L")}L${low.reverse().join("L")}Z` : "";
      return svg("path", { class: `area c${s.colour}`, d });
    });
  }

  legend(point) {
    this.keys.replaceChildren(...this.series.map((s) => {
      const value = point?.values[s.key];
      const shown = value === null || value === undefined ? "–" : this.format(value);
      const swatch = element("i", { className: `c${s.colour}` });
      return element("span", {}, swatch, s.label, element("b", {}, shown));
    }));
  }
}
