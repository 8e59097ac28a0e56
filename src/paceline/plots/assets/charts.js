// Draws charts that Python describes (plots/chart.py) with uPlot: themes, legend, keyboard.
"use strict";
const paceline = {};

(function () {
  const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
  const HEIGHT = matchMedia("(max-width: 620px)").matches ? 160 : 230;
  const mounted = new Set();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  paceline.colour = (number) => css(number < 0 ? "--text" : "--c" + (number % 9));

  // A tree of elements; text is always text, never markup.
  paceline.element = function (tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null));
    return node;
  };
  const el = paceline.element;

  paceline.swatch = function (colour, shape) {
    const node = el("span", { class: `swatch ${shape}` });
    node.style.background = colour;
    return node;
  };

  paceline.format = function (value, unit) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    let text = String(Number(value.toPrecision(4)));
    if (unit === "%") text = value.toFixed(1);
    else if (size >= 1e5) text = value.toLocaleString("en", { maximumFractionDigits: 0 });
    else if (size > 0 && size < 1e-3) text = value.toExponential(1);
    return ["", "%", "x"].includes(unit) ? text + unit : `${text} ${unit}`;
  };

  function withAlpha(colour, alpha) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  }

  const axisTitle = (axis) => (axis.unit ? `${axis.label} (${axis.unit})` : axis.label);

  // Columns for uPlot: x, then every series (summed up where the chart is stacked), then the bands' edges.
  function columnsOf(chart) {
    const sums = new Array(chart.xs.length).fill(0);
    const stack = (series) => series.y.map((value, i) => (sums[i] += series.hidden ? 0 : value || 0));
    const curves = chart.series.map((series) => (chart.stacked ? stack(series) : series.y));
    const edges = chart.series.filter((series) => series.low.length).flatMap(({ low, high }) => [high, low]);
    return [chart.xs, ...curves, ...edges];
  }

  function seriesOptions(chart) {
    const series = [{}];
    const bands = [];
    chart.series.forEach((described, i) => {
      const colour = paceline.colour(described.colour);
      const fill = chart.stacked ? withAlpha(colour, 0.55) : undefined;
      series.push({
        stroke: colour,
        width: 1.75,
        dash: DASHES[described.dash % DASHES.length],
        spanGaps: true,
        show: chart.stacked || !described.hidden,
        points: { show: described.points || chart.xs.length === 1, size: 6, fill: colour, stroke: colour },
        paths: described.stairs ? uPlot.paths.stepped({ align: 1 }) : undefined,
        fill,
      });
      if (chart.stacked && i > 0) bands.push({ series: [i + 1, i], fill });
    });
    for (const described of chart.series.filter((candidate) => candidate.low.length)) {
      const edge = { stroke: "transparent", points: { show: false }, spanGaps: true, show: !described.hidden };
      const fill = withAlpha(paceline.colour(described.colour), 0.2);
      bands.push({ series: [series.length, series.length + 1], fill });
      series.push(edge, { ...edge });
    }
    return { series, bands };
  }

  // Paints within the plot: what is behind the curves (strategies), or in front of the grid (marks, the level).
  function inside(paint) {
    return (u) => {
      const { left, top, width, height } = u.bbox;
      u.ctx.save();
      u.ctx.beginPath();
      u.ctx.rect(left, top, width, height);
      u.ctx.clip();
      paint(u, u.ctx, u.bbox);
      u.ctx.restore();
    };
  }

  function paintSpans(chart) {
    return inside((u, context, { top, height }) => {
      for (const [start, stop, , colour, faint] of chart.spans) {
        const [from, to] = [start, stop].map((x) => u.valToPos(x, "x", true));
        context.fillStyle = withAlpha(paceline.colour(colour), faint ? 0.12 : 0.3);
        context.fillRect(from, top, Math.max(1, to - from), height);
      }
    });
  }

  function paintMarks(chart) {
    return inside((u, context, { left, top, width, height }) => {
      context.strokeStyle = css("--muted");
      context.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      context.beginPath();
      for (const mark of chart.marks) {
        const x = u.valToPos(mark.x, "x", true);
        context.moveTo(x, top);
        context.lineTo(x, top + height);
      }
      if (chart.level !== null) {
        const y = u.valToPos(chart.level, "y", true);
        context.moveTo(left, y);
        context.lineTo(left + width, y);
      }
      context.stroke();
    });
  }

  function rangeX(u, low, high) {
    if (low === null) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  function rangeY({ y, level }) {
    return (u, lowest, highest) => {
      if (lowest === null) return [0, 1];
      const low = Math.min(...[lowest, y.low, level].filter((value) => value !== null));
      const high = Math.max(...[highest, y.high, level].filter((value) => value !== null));
      const pad = (high - low || Math.abs(high) || 1) * 0.06;
      return [low === y.low ? low : low - pad, high + pad];
    };
  }

  function options(chart, width) {
    const font = "11px system-ui, sans-serif";
    const lines = { stroke: css("--grid"), width: 1 };
    const ticks = { ...lines, size: 4 };
    const axis = { stroke: css("--muted"), grid: lines, ticks, font, labelFont: font, labelSize: 18, labelGap: 0 };
    const values = (u, places) => places.map((place) => (place === null ? "" : paceline.format(place, "")));
    return {
      width,
      height: HEIGHT,
      padding: [10, 12, 0, 0],
      ...seriesOptions(chart),
      axes: [
        { ...axis, label: axisTitle(chart.x), size: 30 },
        { ...axis, label: axisTitle(chart.y), size: 54, values },
      ],
      legend: { show: false },
      cursor: { sync: { key: chart.x.label }, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: rangeX }, y: { range: rangeY(chart) } },
      hooks: { drawAxes: [paintSpans(chart)], draw: [paintMarks(chart)] },
    };
  }

  // What a chart says without looking at it.
  function inWords(chart) {
    const parts = chart.series.map((series) => {
      const known = series.y.filter((value) => value !== null);
      const show = (value) => paceline.format(value, chart.y.unit);
      return `${series.label}: ${show(known[0])} to ${show(known[known.length - 1])}`;
    });
    return `${chart.title}; ${axisTitle(chart.y)} over ${axisTitle(chart.x)}. ${parts.join(". ")}`;
  }

  // One chart on the page. It is drawn as soon as it has a width, and again when that changes.
  class View {
    constructor(figure, chart) {
      this.figure = figure;
      this.holder = el("div", { class: "plot", tabindex: "0", role: "img" });
      this.holder.addEventListener("keydown", (event) => this.onKey(event));
      this.readout = el("p", { class: "readout", "aria-live": "polite" });
      this.legend = el("ul", { class: "legend" });
      const title = el("h3", {}, chart.title);
      const note = chart.note ? el("p", { class: "note" }, chart.note) : "";
      figure.replaceChildren(title, note, this.legend, this.holder, this.readout);
      this.update(chart);
      this.observer = new ResizeObserver(() => this.fit());
      this.observer.observe(this.holder);
      mounted.add(this);
    }

    update(chart) {
      const hidden = this.chart ? this.chart.series.filter((series) => series.hidden) : [];
      for (const series of chart.series) series.hidden = hidden.some(({ label }) => label === series.label);
      this.chart = chart;
      this.holder.setAttribute("aria-label", inWords(chart));
      this.redraw();
    }

    redraw() {
      this.makeLegend();
      if (this.plot) this.plot.destroy();
      this.plot = null;
      this.fit();
    }

    fit() {
      const width = this.holder.clientWidth; // none within something that is folded
      if (!width) return;
      if (this.plot) {
        if (width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
        return;
      }
      const settings = options(this.chart, width);
      settings.hooks.setCursor = [(u) => this.showValues(u.cursor.idx)];
      this.plot = new uPlot(settings, columnsOf(this.chart), this.holder);
      this.holder.querySelector("canvas").setAttribute("aria-hidden", "true");
      this.figure.dataset.drawn = String(this.chart.xs.length);
    }

    makeLegend() {
      this.values = this.chart.series.map(() => el("span", { class: "value" }));
      const entries = this.chart.series.map((series, i) => {
        const swatch = paceline.swatch(paceline.colour(series.colour), `dash${series.dash % DASHES.length}`);
        const pressed = String(!series.hidden);
        const attributes = { type: "button", "aria-pressed": pressed, onclick: () => this.toggle(series, i) };
        return el("li", {}, el("button", attributes, swatch, series.label, " ", this.values[i]));
      });
      const spans = new Map(this.chart.spans.map(([, , label, colour]) => [label, colour]));
      for (const [label, colour] of [...spans].sort((a, b) => a[1] - b[1])) {
        entries.push(el("li", {}, paceline.swatch(withAlpha(paceline.colour(colour), 0.45), "wide"), label));
      }
      this.legend.replaceChildren(...entries);
    }

    toggle(series, i) {
      series.hidden = !series.hidden;
      this.redraw();
      this.legend.querySelectorAll("button")[i].focus();
    }

    // Shows the values at a place in the legend, and what is marked there; null: none.
    showValues(i) {
      const { xs, series, x, y, spans, marks } = this.chart;
      const known = typeof i === "number";
      series.forEach((one, n) => { this.values[n].textContent = known ? paceline.format(one.y[i], y.unit) : ""; });
      const span = spans.find(([start, stop]) => start <= xs[i] && xs[i] < stop);
      const mark = marks.find((candidate) => candidate.x === xs[i]);
      const parts = [`${x.label} ${paceline.format(xs[i], x.unit)}`, span && span[2], mark && mark.label];
      this.readout.textContent = known ? parts.filter(Boolean).join(" · ") : "";
    }

    onKey(event) {
      const { xs, series, y } = this.chart;
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
      if (!this.plot || !(event.key in moves)) return;
      event.preventDefault();
      const now = this.plot.cursor.idx ?? -1;
      const target = Math.min(xs.length - 1, Math.max(0, now + moves[event.key]));
      this.plot.setCursor({ left: this.plot.valToPos(xs[target], "x"), top: 20 });
      this.showValues(target);
      const values = series.map((one) => `${one.label} ${paceline.format(one.y[target], y.unit)}`);
      this.readout.textContent += `: ${values.join(", ")}`;
    }

    destroy() {
      this.observer.disconnect();
      if (this.plot) this.plot.destroy();
      this.figure.remove();
      mounted.delete(this);
    }
  }

  // Puts charts into a holder; those that are there already show their new data.
  paceline.show = function (holder, charts) {
    const views = (holder.views = holder.views || new Map());
    for (const [id, view] of views) {
      if (charts.some((chart) => chart.id === id)) continue;
      view.destroy();
      views.delete(id);
    }
    for (const chart of charts) {
      if (views.has(chart.id)) {
        views.get(chart.id).update(chart);
        continue;
      }
      const figure = el("figure", { class: "chart", id: `chart-${chart.id}` });
      holder.append(figure);
      views.set(chart.id, new View(figure, chart));
    }
  };

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    mounted.forEach((view) => view.redraw());
  });
})();
