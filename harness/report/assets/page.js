"use strict";
// Tables: a click or key press on a heading sorts by it; cells without a figure stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
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

// A filter keeps the rows that have all of its words, and the points of figures beside them.
for (const input of document.querySelectorAll(".filter input")) input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/);
  const section = input.closest("section");
  for (const row of section.querySelectorAll("tbody tr")) row.hidden = !has(row.textContent, words);
  for (const figure of figures.filter(({ element }) => section.contains(element))) {
    figure.words = words;
    figure.change();
  }
});
function has(text, words) {
  const lower = text.toLowerCase();
  return words.every((word) => lower.includes(word));
}

// Views: one model at a time, by the fragment of the address.
const views = [...document.querySelectorAll(".view")];
function show() {
  const target = document.getElementById(location.hash.slice(1));
  const opens = document.getElementById(document.querySelector("main").dataset.opens);
  const view = target?.closest(".view") ?? (target ? views.find(({ hidden }) => !hidden) : opens);
  for (const each of views) each.hidden = each !== view;
  for (const link of document.querySelectorAll(".models a")) {
    link.removeAttribute("aria-current");
    if (link.hash !== `#${view?.id}`) continue;
    link.setAttribute("aria-current", "page");
    link.parentElement.scrollLeft = link.offsetLeft - 40;
  }
  if (target && target !== view) target.scrollIntoView();
  name();
}

// Pictures: a switch between their pairs of measures, and names where there is room.
for (const overview of document.querySelectorAll(".overview")) {
  const later = overview.querySelectorAll("[data-later]");
  for (const each of later) each.hidden = true;
  const buttons = [...overview.querySelectorAll("[data-shows]")];
  for (const button of buttons) button.addEventListener("click", () => {
    for (const each of buttons) each.setAttribute("aria-pressed", each === button);
    for (const each of overview.querySelectorAll("[data-name]")) each.hidden = each.dataset.name !== button.dataset.shows;
    name();
  });
}
const NAME_GAP = 6; // px from a name to the point of another, beside which it would be read as its
function name() {
  for (const frame of document.querySelectorAll(".view:not([hidden]) .picture:not([hidden]) .frame")) {
    const room = frame.parentElement.getBoundingClientRect();
    const dots = [...frame.querySelectorAll(".dot > svg")].map((dot) => [dot, dot.getBoundingClientRect()]);
    const taken = []; // by names
    const names = [...frame.querySelectorAll(".front .name"), ...frame.querySelectorAll(".dot:not(.front) .name")];
    for (const text of names) {
      const none = parseFloat(text.parentElement.style.left) > 50 ? "none left" : "none"; // shown where it is chosen
      const fits = ["right", "left", "above", "below", none].some((side) => {
        text.className = `name ${side}`;
        const box = text.getBoundingClientRect();
        const apart = (other, by) => box.right + by < other.left || box.left - by > other.right || box.bottom - by / 2 < other.top || box.top + by / 2 > other.bottom;
        const clear = ([dot, other]) => apart(other, dot.parentElement === text.parentElement ? 0 : NAME_GAP);
        return box.left > room.left && box.right < room.right && dots.every(clear) && taken.every((other) => apart(other, 0));
      });
      if (fits) taken.push(text.getBoundingClientRect());
    }
  }
}
addEventListener("resize", name);

// Points: one stop of the Tab key in each picture. Arrow keys go to the next one, from the left.
for (const frame of document.querySelectorAll(".frame")) {
  const dots = [...frame.querySelectorAll(".dot")].sort((a, b) => parseFloat(a.style.left) - parseFloat(b.style.left));
  const stop = (at) => dots.forEach((dot) => { dot.tabIndex = dot === at ? 0 : -1; });
  stop(dots[0]);
  frame.addEventListener("focusin", ({ target }) => stop(target));
  frame.addEventListener("keydown", (event) => {
    const at = dots.indexOf(event.target);
    const next = dots[{ ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: dots.length - 1 }[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}

// Selection: a click on a variant marks it everywhere, a second one, or Escape, clears it.
let chosen = null;
const status = document.getElementById("chosen");
function choose(label) {
  chosen = label === chosen ? null : label;
  document.body.classList.toggle("choosing", chosen !== null);
  for (const each of document.querySelectorAll("[data-variant]")) {
    const on = each.dataset.variant === chosen;
    each.classList.toggle("chosen", on);
    if (each.hasAttribute("aria-pressed")) each.setAttribute("aria-pressed", on);
  }
  status.hidden = chosen === null;
  status.textContent = chosen === null ? "" : `Selected: ${chosen}. A second click clears it.`;
  figures.forEach((figure) => figure.change());
}
addEventListener("click", (event) => {
  const picked = event.target.closest("button[data-variant]");
  if (!picked) return;
  // Where points lie on each other, each click selects the next one below.
  const here = event.detail ? new Set(document.elementsFromPoint(event.clientX, event.clientY)) : new Set();
  const labels = [...document.querySelectorAll(".dot")].filter((dot) => here.has(dot)).reverse().map((dot) => dot.dataset.variant);
  const at = labels.indexOf(chosen);
  choose(at < 0 ? labels[0] ?? picked.dataset.variant : labels[at + 1] ?? chosen);
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !tip) return;
  tip.hidden = true;
  if (chosen !== null) choose(chosen);
});

// The row of a point, beside it.
const tip = document.getElementById("tip");
function explain(event) {
  const point = event.target.closest?.("[data-tip]");
  if (!tip) return;
  tip.hidden = !point;
  if (!point) return;
  const box = point.getBoundingClientRect();
  const near = [...(point.parentElement.closest(".frame")?.querySelectorAll(".dot") ?? [])].filter((other) => {
    const its = other.getBoundingClientRect();
    return other !== point && Math.hypot(its.x - box.x, its.y - box.y) < box.width / 2;
  });
  const others = near.length ? `\nalso here: ${near.map((other) => other.dataset.variant).join(", ")}` : "";
  tip.textContent = point.dataset.tip + others;
  tip.style.left = `${Math.max(8, Math.min(box.right + 8, innerWidth - tip.offsetWidth - 8)) + scrollX}px`;
  const above = box.top - tip.offsetHeight - 8;
  tip.style.top = `${(above > 0 ? above : box.bottom + 8) + scrollY}px`;
}
for (const kind of ["pointerover", "focusin", "click"]) addEventListener(kind, explain);

// Figures: drawn when they scroll into view, and redrawn when they change.
const darkness = matchMedia("screen and (prefers-color-scheme: dark)");
let printing = false; // on white paper
const touch = matchMedia("(pointer: coarse)").matches;
const NIGHT = JSON.parse(document.getElementById("night").textContent);
const hidden = {}; // group -> variants of its legend that are switched off
const figures = [];

// plotly.js: unpacked and run once, when the first figure comes near the view.
let loading = null;
function plotly() {
  return loading ??= (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (byte) => byte.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  })();
}

function coloured(value) {
  if (typeof value === "string") return darkness.matches && !printing ? NIGHT[value] ?? value : value;
  if (Array.isArray(value)) return value.map(coloured);
  if (value === null || typeof value !== "object" || value.bdata) return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
}

const AROUND = 80; // px of a figure above and below its names
class Figure {
  constructor(element) {
    this.element = element;
    this.plot = element.querySelector(".plot");
    this.height = parseFloat(this.plot.style.height);
    this.logarithmic = false;
    this.spikes = false;
    this.off = new Set(); // overlays
    this.words = []; // of a filter
    this.resets = 0; // of the zoom
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
      tools.append(check("all values in view", false, (on) => { this.spikes = on; this.draw(); }));
    }
    tools.append(button("save as PNG", "", () => {
      Plotly.downloadImage(this.plot, { format: "png", scale: 2, filename: this.element.id || this.group });
    }));
    if (!touch) tools.append(button("reset zoom", "", () => { this.resets += 1; this.draw(); }));
    const present = new Set(this.data.map(({ meta }) => meta?.v));
    const buttons = this.legend.flatMap((entry, v) => present.has(v) ? [this.variant(...entry, v)] : []);
    if (buttons.length > 1) {
      const variants = group(this.legendOf, this.stacked(buttons));
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

  // The buttons of each stack behind one that switches all of them.
  stacked(buttons) {
    const all = (name, of) => button(name, "every", () => this.toggle((off) => {
      const on = of.some((v) => off.has(v));
      for (const v of of) on ? off.delete(v) : off.add(v);
    }));
    const place = (each) => Number(each.dataset.v);
    const stacks = [...new Set(buttons.map((each) => each.dataset.stack))];
    const whole = all("all / none", buttons.map(place));
    if (stacks.length < 2) return [...buttons, whole];
    return [...stacks.map((stack) => {
      const own = buttons.filter((each) => each.dataset.stack === stack);
      return group(stack, [all(stack, own.map(place)), ...own]);
    }), whole];
  }

  variant(label, colour, symbol, stack, v) {
    const made = button("", "variant", () => this.toggle((off) => off.has(v) ? off.delete(v) : off.add(v)));
    const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    swatch.innerHTML = `<path d="M0 6h22" stroke="currentColor" stroke-width="1.5"/><use href="#shape-${symbol}" x="11" y="6" fill="currentColor"/>`;
    swatch.dataset.colour = colour;
    made.dataset.v = v;
    made.dataset.stack = stack;
    made.setAttribute("aria-label", label);
    made.append(swatch, stack && label.startsWith(`${stack} `) ? label.slice(stack.length + 1) : label);
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

  // Others than the selected variant are pale, in traces of their own or as points of one.
  mark(data) {
    const v = this.legend.findIndex(([label]) => label === chosen);
    const escaped = chosen?.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
    for (const trace of data) {
      const place = Array.isArray(trace.y) ? trace.y.indexOf(escaped) : -1;
      if (place >= 0) trace.selectedpoints = [place];
      else if (v >= 0 && this.legendOf === "Variants" && trace.meta?.v !== undefined) {
        if (trace.meta.v !== v) trace.opacity = 0.12;
        else if (trace.line) trace.line.width *= 2;
      }
    }
  }

  // Of the points at names, those that have all words of the filter.
  filter(data, { yaxis }) {
    if (yaxis.type !== "category" || !this.words.length) return;
    for (const trace of data) {
      const kept = (_, i) => has(`${trace.y[i]} ${trace.name} ${trace.text[i]}`, this.words);
      const symbol = trace.marker.symbol.filter(kept);
      Object.assign(trace, { x: trace.x.filter(kept), text: trace.text.filter(kept), y: trace.y.filter(kept) });
      trace.marker.symbol = symbol;
    }
    const names = new Set(data.flatMap(({ y }) => y));
    const line = (this.height - AROUND) / yaxis.categoryarray.length;
    yaxis.categoryarray = yaxis.categoryarray.filter((name) => names.has(name));
    yaxis.range = [names.size - 0.5, -0.5];
    this.plot.style.height = `${AROUND + line * names.size}px`;
  }

  draw() {
    if (!window.Plotly) {
      plotly().then(() => this.draw(), () => { this.plot.textContent = "This browser is too old to draw it; the tables have its figures."; });
      return;
    }
    if (!this.data) this.begin();
    const off = hidden[this.group];
    const data = coloured(this.data);
    const narrow = this.plot.clientWidth < 700;
    for (const trace of data) {
      const { v, kind } = trace.meta ?? {};
      trace.visible = !off.has(v) && !this.off.has(kind);
    }
    this.mark(data);
    const layout = coloured(this.layout);
    this.filter(data, layout);
    if (narrow) {
      layout.margin.r = 28; // half of the last tick's label, which plotly.js leaves out where it does not fit
      if (!layout.xaxis.tickvals) Object.assign(layout.xaxis, { nticks: 4, tickangle: 0 });
    }
    // Keep the zoom of the reader until the axis type changes, or a reset.
    layout.uirevision = `${this.logarithmic} ${this.spikes} ${this.resets}`;
    layout.dragmode = touch ? false : "zoom";
    if (touch) layout.xaxis.fixedrange = layout.yaxis.fixedrange = true; // a finger scrolls the page, a tap reads a value
    if (this.logarithmic) Object.assign(layout.yaxis, { type: "log", dtick: "D2" });
    layout.yaxis.range = this.range(data) ?? layout.yaxis.range;
    for (const each of this.element.querySelectorAll(".variant")) {
      each.setAttribute("aria-pressed", !off.has(Number(each.dataset.v)));
      each.firstChild.style.color = coloured(each.firstChild.dataset.colour);
    }
    this.stale = false;
    const made = this.plot.data;
    Plotly.react(this.plot, data, layout, { responsive: true, displayModeBar: false });
    if (!made) this.plot.on("plotly_click", ({ points: [{ data: { meta }, y }] }) => {
      const label = this.legendOf === "Variants" && this.legend[meta?.v]?.[0];
      if (status && (label || typeof y === "string")) choose(label || unescaped(y));
    });
  }
}

function unescaped(text) {
  return text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
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
for (const element of document.querySelectorAll("figure:not(.overview)")) {
  figures.push(new Figure(element));
  watcher.observe(element);
}
darkness.addEventListener("change", () => figures.forEach((figure) => figure.change()));
for (const kind of ["beforeprint", "afterprint"]) addEventListener(kind, () => {
  printing = kind === "beforeprint";
  for (const figure of figures) if (figure.element.offsetParent && window.Plotly) figure.draw();
});
if (views.length) {
  addEventListener("hashchange", show);
  show();
}
window.requestIdleCallback?.(() => document.querySelector(".plot") && plotly().catch(() => {}), { timeout: 2000 });
document.documentElement.dataset.ready = "yes";
