"use strict";
// Tables: a click or key press on a heading sorts by it; cells without a figure stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const numeric = head.classList.contains("num");
    const key = (row) => {
      const text = row.cells[column].textContent;
      return numeric ? parseFloat(text.replace(/[,~]/g, "")) : text;
    };
    const compare = (a, b) => {
      if (!numeric) return down * a[0].localeCompare(b[0], "en", { numeric: true });
      return isNaN(a[0]) || isNaN(b[0]) ? isNaN(a[0]) - isNaN(b[0]) : down * (a[0] - b[0]);
    };
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
    body.append(...[...body.rows].map((row) => [key(row), row]).sort(compare).map(([, row]) => row));
  }));
}
document.getElementById("only")?.addEventListener("change", (event) => {
  const model = event.target.value;
  for (const row of document.querySelectorAll("tr[data-m]")) row.hidden = model !== "" && row.dataset.m !== model;
});

// Figures: drawn when they scroll into view, and redrawn when they change.
const darkness = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)").matches;
const NIGHT = { "#1a1a1a": "#e6e6e6", "#ffffff": "#121212", "#dddddd": "#333333", "#666666": "#9a9a9a", "#000000": "#ffffff",
  "#0072B2": "#3a9bdc" };
const SHAPES = {
  circle: '<circle cx="11" cy="6" r="4"/>', square: '<path d="M7 2h8v8h-8z"/>', diamond: '<path d="M11 1l5 5-5 5-5-5z"/>',
  "triangle-up": '<path d="M11 1l5 9h-10z"/>', "triangle-down": '<path d="M11 11l5-9h-10z"/>',
  x: '<path d="M7 1l4 3 4-3 1 1-3 4 3 4-1 1-4-3-4 3-1-1 3-4-3-4z"/>', cross: '<path d="M9 1h4v3h3v4h-3v3h-4v-3h-3v-4h3z"/>',
  star: '<path d="M11 0l1.6 4h4.2l-3.4 2.6 1.3 4.4-3.7-2.6-3.7 2.6 1.3-4.4-3.4-2.6h4.2z"/>',
};
const hidden = {}; // group -> variants of its legend that are switched off
const figures = [];

function coloured(value) {
  if (typeof value === "string") return darkness.matches ? NIGHT[value] ?? value : value;
  if (Array.isArray(value)) return value.map(coloured);
  if (value === null || typeof value !== "object" || value.bdata) return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
}

class Figure {
  constructor(element) {
    this.element = element;
    this.plot = element.querySelector(".plot");
    this.logarithmic = false;
    this.spikes = false;
    this.off = new Set(); // overlays
    this.stale = true;
    this.seen = false;
  }

  begin() {
    Object.assign(this, JSON.parse(this.element.querySelector("script").textContent));
    hidden[this.group] ??= new Set();
    const tools = this.element.querySelector(".tools");
    if (this.switch) tools.append(this.scales());
    for (const [kind, label] of Object.entries(this.overlays)) {
      tools.append(check(label, true, (on) => { this.off[on ? "delete" : "add"](kind); this.draw(); }));
    }
    if (this.data.some(({ meta }) => meta?.top && meta.peak > 1.5 * meta.top)) {
      tools.append(check("all spikes in view", false, (on) => { this.spikes = on; this.draw(); }));
    }
    const present = new Set(this.data.map(({ meta }) => meta?.v));
    const buttons = this.legend.flatMap(([label, colour, symbol], v) => present.has(v) ? [this.variant(label, colour, symbol, v)] : []);
    if (buttons.length > 1) {
      const all = button("all", "every", () => this.toggle(() => hidden[this.group].clear()));
      const none = button("none", "every", () => this.toggle(() => present.forEach((v) => hidden[this.group].add(v))));
      const variants = group(this.legendOf, [...buttons, all, none]);
      tools.append(this.element.className ? folded(this.legendOf, variants) : variants);
    }
  }

  scales() {
    const buttons = ["linear", "log"].map((name) => button(name, "scale", () => {
      this.logarithmic = name === "log";
      buttons.forEach((each) => each.setAttribute("aria-pressed", each.textContent === name));
      this.draw();
    }));
    buttons.forEach((each, i) => each.setAttribute("aria-pressed", i === 0));
    return group("Scale of the y axis", buttons);
  }

  variant(label, colour, symbol, v) {
    const made = button("", "variant", () => this.toggle((off) => off.has(v) ? off.delete(v) : off.add(v)));
    const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    swatch.innerHTML = `<path d="M0 6h22" stroke="currentColor" stroke-width="1.5"/><g fill="currentColor">${SHAPES[symbol] ?? ""}</g>`;
    swatch.dataset.colour = colour;
    made.dataset.v = v;
    made.append(swatch, label);
    return made;
  }

  toggle(change) {
    change(hidden[this.group]);
    for (const figure of figures.filter(({ group }) => group === this.group)) figure.change();
  }

  change() {
    this.stale = true;
    if (this.seen) this.draw();
  }

  range(data) {
    const metas = data.filter(({ visible, meta }) => visible && meta?.top).map(({ meta }) => meta);
    if (!metas.length) return null;
    const top = Math.max(...metas.map((meta) => this.spikes ? Math.max(meta.peak, meta.top) : meta.top));
    const low = Math.min(...data.flatMap(({ visible, meta }) => visible && meta?.low > 0 ? [meta.low] : []));
    return this.logarithmic ? [Math.log10(low * 0.9), Math.log10(top * 1.05)] : [0, top * 1.03];
  }

  draw() {
    if (!this.data) this.begin();
    const off = hidden[this.group];
    const data = coloured(this.data);
    for (const trace of data) trace.visible = !off.has(trace.meta?.v) && !this.off.has(trace.meta?.kind);
    const layout = coloured(this.layout);
    // Keep the zoom of the reader until the axis type changes.
    layout.uirevision = `${this.logarithmic} ${this.spikes}`;
    layout.dragmode = touch ? false : "zoom";
    if (touch) layout.xaxis.fixedrange = layout.yaxis.fixedrange = true; // a finger scrolls the page, a tap reads a value
    if (this.logarithmic) Object.assign(layout.yaxis, { type: "log", dtick: "D2" });
    layout.yaxis.range = this.range(data) ?? layout.yaxis.range;
    for (const each of this.element.querySelectorAll(".variant")) {
      each.setAttribute("aria-pressed", !off.has(Number(each.dataset.v)));
      each.firstChild.style.color = coloured(each.firstChild.dataset.colour);
    }
    this.stale = false;
    Plotly.react(this.plot, data, layout, { responsive: true, displaylogo: false,
      displayModeBar: touch ? false : "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
  }
}

function button(text, kind, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = kind;
  made.textContent = text;
  made.addEventListener("click", act);
  return made;
}

function check(text, on, act) {
  const label = document.createElement("label");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = on;
  box.addEventListener("change", () => act(box.checked));
  label.append(box, text);
  return label;
}

function folded(label, content) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = label;
  details.append(summary, content);
  return details;
}

function group(label, members) {
  const made = document.createElement("div");
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", label);
  made.append(...members);
  return made;
}

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const figure = figures.find(({ element }) => element === target);
    figure.seen = isIntersecting;
    if (isIntersecting && figure.stale) figure.draw();
  }
}, { rootMargin: "300px" });
for (const element of document.querySelectorAll("figure")) {
  figures.push(new Figure(element));
  watcher.observe(element);
}
darkness.addEventListener("change", () => figures.forEach((figure) => figure.change()));
addEventListener("beforeprint", () => figures.forEach((figure) => figure.stale && figure.draw()));
document.documentElement.dataset.ready = "yes";
