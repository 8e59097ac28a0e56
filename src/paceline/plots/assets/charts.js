// Draws charts that Python describes (plots/chart.py) with uPlot: themes, legend, keyboard, table of values.
"use strict";
const paceline = {};

(function () {
  const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
  const HEIGHT = 230;
  const mounted = new Set();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  paceline.colour = (number) => css(number < 0 ? "--text" : "--c" + (number % 9));

  // A tree of elements; text is always text, never markup.
  paceline.element = function (tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) {
      if (child !== null && child !== undefined) node.append(child);
    }
    return node;
  };
  const el = paceline.element;

  paceline.format = function (value, unit) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    let text;
    if (value === 0) text = "0";
    else if (unit === "%") text = value.toFixed(1);
    else if (size >= 1e5) text = value.toLocaleString("en", { maximumFractionDigits: 0 });
    else if (size < 1e-3) text = value.toExponential(1);
    else text = String(Number(value.toPrecision(4)));
    return unit && unit !== "x" ? `${text} ${unit}`.replace(" %", "%") : text + (unit === "x" ? "x" : "");
  };

  function withAlpha(colour, alpha) {
    const hex = colour.replace("#", "");
    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  const axisTitle = (axis) => (axis.unit ? `${axis.label} (${axis.unit})` : axis.label);

  // Columns for uPlot: x, then every series (summed up where the chart is stacked), then the bands' edges.
  function columnsOf(chart) {
    const columns = [chart.xs];
    const sums = new Array(chart.xs.length).fill(0);
    for (const series of chart.series) {
      if (chart.stacked && !series.hidden) {
        columns.push(series.y.map((value, i) => (sums[i] += value || 0)));
      } else if (chart.stacked) {
        columns.push(sums.slice());
      } else {
        columns.push(series.y);
      }
    }
    for (const series of chart.series) {
      if (series.low.length) columns.push(series.high, series.low);
    }
    return columns;
  }

  function seriesOptions(chart) {
    const options = [{}];
    const bands = [];
    chart.series.forEach((series, i) => {
      const colour = paceline.colour(series.colour);
      const option = {
        label: series.label,
        stroke: colour,
        width: 1.75,
        dash: DASHES[series.dash % DASHES.length],
        spanGaps: true,
        show: !series.hidden || chart.stacked,
        points: { show: series.points || chart.xs.length === 1 || !series.line, size: 6, fill: colour, stroke: colour },
      };
      if (!series.line) option.paths = () => null;
      else if (series.bars) {
        option.paths = uPlot.paths.bars({ size: [0.7, 60] });
        option.fill = withAlpha(colour, 0.75);
        option.points = { show: false };
      } else if (series.stairs) option.paths = uPlot.paths.stepped({ align: 1 });
      if (chart.stacked) {
        option.fill = withAlpha(colour, 0.55);
        option.points = { show: chart.xs.length === 1 };
        if (i > 0) bands.push({ series: [i + 1, i], fill: withAlpha(colour, 0.55) });
      }
      options.push(option);
    });
    for (const series of chart.series) {
      if (!series.low.length) continue;
      const colour = paceline.colour(series.colour);
      const edge = { stroke: "transparent", points: { show: false }, spanGaps: true, show: !series.hidden };
      bands.push({ series: [options.length, options.length + 1], fill: withAlpha(colour, 0.2) });
      options.push({ ...edge, label: "" }, { ...edge, label: "" });
    }
    return { series: options, bands };
  }

  // Strategies and other spans behind the curves; marks and the level in front of the grid.
  function drawBehind(chart) {
    return (u) => {
      const { left, top, width, height } = u.bbox;
      const context = u.ctx;
      context.save();
      context.beginPath();
      context.rect(left, top, width, height);
      context.clip();
      for (const [start, stop, , colour, faint] of chart.spans) {
        const from = u.valToPos(start, "x", true);
        const to = u.valToPos(stop, "x", true);
        context.fillStyle = withAlpha(paceline.colour(colour), faint ? 0.12 : 0.3);
        context.fillRect(from, top, Math.max(1, to - from), height);
      }
      context.restore();
    };
  }

  function drawInFront(chart) {
    return (u) => {
      const { left, top, width, height } = u.bbox;
      const context = u.ctx;
      context.save();
      context.beginPath();
      context.rect(left, top, width, height);
      context.clip();
      context.lineWidth = devicePixelRatio;
      context.strokeStyle = css("--muted");
      context.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      for (const mark of chart.marks) {
        const x = u.valToPos(mark.x, "x", true);
        context.beginPath();
        context.moveTo(x, top);
        context.lineTo(x, top + height);
        context.stroke();
      }
      if (chart.level !== null) {
        const y = u.valToPos(chart.level, "y", true);
        context.beginPath();
        context.moveTo(left, y);
        context.lineTo(left + width, y);
        context.stroke();
      }
      context.restore();
    };
  }

  function range(axis, isY, chart) {
    return (u, low, high) => {
      if (low === null || high === null) return [0, 1];
      if (!isY) {
        if (chart.names.length) return [-0.6, chart.names.length - 0.4];
        return low === high ? [low - 1, high + 1] : [low, high];
      }
      if (axis.low !== null) low = Math.min(low, axis.low);
      if (axis.high !== null) high = Math.max(high, axis.high);
      if (chart.level !== null) [low, high] = [Math.min(low, chart.level), Math.max(high, chart.level)];
      if (axis.log) return uPlot.rangeLog(low, high, 10, true);
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      return [axis.low !== null && low >= axis.low ? axis.low : low - pad, high + pad];
    };
  }

  function options(chart, width) {
    const { series, bands } = seriesOptions(chart);
    const axis = {
      stroke: css("--muted"),
      grid: { stroke: css("--grid"), width: 1 },
      ticks: { stroke: css("--grid"), width: 1, size: 4 },
      font: "11px system-ui, sans-serif",
      labelFont: "11px system-ui, sans-serif",
      labelSize: 18,
      labelGap: 0,
    };
    const axes = [
      { ...axis, label: axisTitle(chart.x), size: 30 },
      { ...axis, label: axisTitle(chart.y), size: 54, values: (u, ticks) => ticks.map((t) => (t === null ? "" : paceline.format(t, ""))) },
    ];
    if (chart.names.length) {
      axes[0].splits = () => chart.names.map((_, i) => i);
      axes[0].values = () => chart.names;
    }
    return {
      width,
      height: HEIGHT,
      padding: [10, 12, 0, 0],
      series,
      bands,
      axes,
      legend: { show: false },
      cursor: { sync: { key: chart.x.label }, points: { size: 7 }, drag: { x: true, y: false } },
      scales: {
        x: { time: false, distr: chart.x.log ? 3 : 1, range: range(chart.x, false, chart) },
        y: { distr: chart.y.log ? 3 : 1, range: range(chart.y, true, chart) },
      },
      hooks: { drawAxes: [drawBehind(chart)], draw: [drawInFront(chart)] },
    };
  }

  // What a chart says without looking at it.
  function inWords(chart) {
    const parts = [];
    for (const series of chart.series.slice(0, 6)) {
      const known = series.y.map((y, i) => [chart.xs[i], y]).filter(([, y]) => y !== null);
      if (!known.length) continue;
      const ys = known.map(([, y]) => y);
      const show = (y) => paceline.format(y, chart.y.unit);
      const lowest = ys.reduce((a, b) => Math.min(a, b));
      const highest = ys.reduce((a, b) => Math.max(a, b));
      parts.push(`${series.label}: ${show(ys[0])} to ${show(ys[ys.length - 1])}, between ${show(lowest)} and ${show(highest)}`);
    }
    return `${chart.title}; ${axisTitle(chart.y)} over ${axisTitle(chart.x)}. ${parts.join(". ")}`;
  }

  const xText = (chart, i) => (chart.names.length ? chart.names[chart.xs[i]] : `${chart.x.label} ${paceline.format(chart.xs[i], chart.x.unit)}`);

  class View {
    constructor(figure, chart) {
      this.figure = figure;
      this.chart = chart;
      this.holder = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": inWords(chart) });
      this.readout = el("p", { class: "readout", "aria-live": "polite" });
      this.legend = el("ul", { class: "legend" });
      this.table = el("details", { class: "values", ontoggle: () => this.fillTable() }, el("summary", {}, "Values as a table"));
      const title = el("h3", {}, chart.title);
      const note = chart.note ? el("p", { class: "note" }, chart.note) : null;
      figure.replaceChildren(title, ...(note ? [note] : []), this.legend, this.holder, this.readout, this.table);
      this.holder.addEventListener("keydown", (event) => this.onKey(event));
      this.makeLegend();
      this.observer = new IntersectionObserver((entries) => {
        if (entries.some((entry) => entry.isIntersecting)) this.draw();
      }, { rootMargin: "200px" });
      this.observer.observe(this.holder);
      mounted.add(this);
    }

    makeLegend() {
      const spans = new Map();
      for (const [, , label, colour] of this.chart.spans) spans.set(label, colour);
      this.values = [];
      const entries = this.chart.series.map((series, i) => {
        const value = el("span", { class: "value" });
        this.values.push(value);
        const swatch = el("span", { class: "swatch" });
        swatch.style.background = paceline.colour(series.colour);
        if (series.dash) swatch.classList.add("dash" + (series.dash % DASHES.length));
        const button = el("button", { type: "button", "aria-pressed": String(!series.hidden), onclick: () => this.toggle(i, button) }, swatch, series.label, " ", value);
        return el("li", {}, button);
      });
      for (const [label, colour] of [...spans].sort((a, b) => a[1] - b[1])) {
        const swatch = el("span", { class: "swatch wide" });
        swatch.style.background = withAlpha(paceline.colour(colour), 0.45);
        entries.push(el("li", { class: "span" }, swatch, label));
      }
      this.legend.replaceChildren(...entries);
    }

    toggle(i, button) {
      const series = this.chart.series[i];
      series.hidden = !series.hidden;
      button.setAttribute("aria-pressed", String(!series.hidden));
      this.redraw();
    }

    draw() {
      if (this.plot || !this.figure.isConnected) return;
      const width = Math.max(220, this.holder.clientWidth);
      const settings = options(this.chart, width);
      settings.hooks.setCursor = [(u) => this.showValues(u.cursor.idx)];
      this.plot = new uPlot(settings, columnsOf(this.chart), this.holder);
      for (const node of this.holder.querySelectorAll("canvas")) node.setAttribute("aria-hidden", "true");
      this.figure.dataset.drawn = String(this.chart.xs.length);
      this.resizer = new ResizeObserver(() => {
        const now = Math.max(220, this.holder.clientWidth);
        if (this.plot && now !== this.plot.width) this.plot.setSize({ width: now, height: HEIGHT });
      });
      this.resizer.observe(this.holder);
    }

    redraw() {
      if (!this.plot) return;
      this.plot.destroy();
      this.resizer.disconnect();
      this.plot = null;
      this.draw();
    }

    update(chart) {
      const hidden = new Set(this.chart.series.filter((series) => series.hidden).map((series) => series.label));
      for (const series of chart.series) series.hidden = hidden.has(series.label);
      const same = chart.series.length === this.chart.series.length && chart.series.every((s, i) => s.label === this.chart.series[i].label && s.low.length > 0 === this.chart.series[i].low.length > 0);
      const sameExtras = JSON.stringify([chart.marks, chart.spans, chart.names]) === JSON.stringify([this.chart.marks, this.chart.spans, this.chart.names]);
      this.chart = chart;
      this.holder.setAttribute("aria-label", inWords(chart));
      if (!same || !sameExtras) {
        this.makeLegend();
        this.redraw();
      } else if (this.plot) {
        this.plot.setData(columnsOf(chart));
        this.figure.dataset.drawn = String(chart.xs.length);
      }
      if (this.table.open) this.fillTable();
    }

    showValues(i) {
      this.chart.series.forEach((series, number) => {
        const known = i !== null && i !== undefined;
        this.values[number].textContent = known ? paceline.format(series.y[i], this.chart.y.unit) : "";
      });
      const spans = this.chart.spans;
      if (i !== null && i !== undefined && this.plot) {
        const x = this.chart.xs[i];
        const span = spans.find(([start, stop]) => start <= x && x < stop);
        const mark = this.chart.marks.find((candidate) => candidate.x === x);
        this.readout.textContent = [xText(this.chart, i), span && span[2], mark && mark.label].filter(Boolean).join(" · ");
      } else this.readout.textContent = "";
    }

    onKey(event) {
      const last = this.chart.xs.length - 1;
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
      if (!this.plot || !(event.key in moves || event.key === "Home" || event.key === "End")) return;
      event.preventDefault();
      const now = this.plot.cursor.idx ?? (event.key === "ArrowLeft" ? last + 1 : -1);
      const target = event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(last, Math.max(0, now + moves[event.key]));
      const left = this.plot.valToPos(this.chart.xs[target], "x");
      this.plot.setCursor({ left, top: 20 });
      this.showValues(target);
      const values = this.chart.series.map((series) => `${series.label} ${paceline.format(series.y[target], this.chart.y.unit)}`);
      this.readout.textContent = `${xText(this.chart, target)}: ${values.join(", ")}`;
    }

    // At most a hundred rows: it is for reading; the files have everything.
    fillTable() {
      if (!this.table.open) return;
      const { chart } = this;
      const every = Math.max(1, Math.ceil(chart.xs.length / 100));
      const head = el("tr", {}, el("th", { scope: "col" }, axisTitle(chart.x)), chart.series.map((series) => el("th", { scope: "col" }, `${series.label}${chart.y.unit ? ` (${chart.y.unit})` : ""}`)));
      const rows = [];
      for (let i = 0; i < chart.xs.length; i += every) {
        const name = chart.names.length ? chart.names[chart.xs[i]] : paceline.format(chart.xs[i], "");
        rows.push(el("tr", {}, el("th", { scope: "row" }, name), chart.series.map((series) => el("td", {}, paceline.format(series.y[i], "")))));
      }
      const old = this.table.querySelector("div");
      if (old) old.remove();
      this.table.append(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
    }

    destroy() {
      this.observer.disconnect();
      if (this.resizer) this.resizer.disconnect();
      if (this.plot) this.plot.destroy();
      mounted.delete(this);
    }
  }

  // Puts charts into a holder; those that are there already are updated in place.
  paceline.show = function (holder, charts) {
    const views = (holder.views = holder.views || new Map());
    const wanted = new Set(charts.map((chart) => chart.id));
    for (const [id, view] of views) {
      if (wanted.has(id)) continue;
      view.destroy();
      view.figure.remove();
      views.delete(id);
    }
    for (const chart of charts) {
      const view = views.get(chart.id);
      if (view) view.update(chart);
      else {
        const figure = el("figure", { class: "chart", id: `chart-${chart.id}` });
        holder.append(figure);
        views.set(chart.id, new View(figure, chart));
      }
    }
  };

  const repaint = () => mounted.forEach((view) => {
    view.makeLegend();
    view.redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  paceline.data = (id) => JSON.parse(document.getElementById(id).textContent);
})();
