// Builds the views of runs from their data: cards, sections of charts, the chosen step, samples, tables.
"use strict";
(function () {
  const el = paceline.element;
  const MOST_SAMPLES = 40;

  function cardsOf(cards) {
    return el("div", { class: cards.length > 3 ? "cards three" : "cards" }, cards.map((card) => {
      const parts = card.shares || [];
      const bar = parts.length ? el("div", { class: "share", role: "img", "aria-label": parts.map(([name, share]) => `${name} ${Math.round(100 * share)}%`).join(", ") }, parts.map(([, share, colour]) => {
        const piece = el("span", {});
        piece.style.width = `${100 * share}%`;
        piece.style.background = paceline.colour(colour);
        return piece;
      })) : null;
      const keys = parts.length ? el("ul", { class: "keys" }, parts.map(([name, share, colour]) => {
        const swatch = el("span", { class: "swatch wide" });
        swatch.style.background = paceline.colour(colour);
        return el("li", {}, swatch, `${name} ${Math.round(100 * share)}%`);
      })) : null;
      return el("div", { class: `card ${card.tone}` }, el("h3", {}, card.question), el("p", { class: "verdict" }, card.verdict), bar, keys, el("p", {}, card.detail));
    }));
  }

  paceline.table = function (table) {
    const head = el("tr", {}, table.columns.map((name) => el("th", { scope: "col" }, name)));
    const rows = table.rows.map((row) => el("tr", {}, row.map((cell, i) => {
      if (i === 0) return el("th", { scope: "row", class: "text" }, cell);
      return el("td", { class: (table.text || []).includes(i) ? "text" : "" }, cell);
    })));
    return el("div", { class: "panel", id: `table-${table.id}` }, el("h3", {}, table.title), table.note ? el("p", { class: "note" }, table.note) : null, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
  };

  function fillSection(holder, section) {
    if (!holder.charts) {
      holder.charts = el("div", { class: "charts" });
      holder.tables = el("div", {});
      holder.text = el("pre", { class: "figures", tabindex: "0" });
      holder.replaceChildren(el("h2", {}, section.title), el("p", { class: "muted" }, section.intro), holder.text, holder.charts, holder.tables);
    }
    holder.text.textContent = section.text;
    holder.text.hidden = !section.text;
    paceline.show(holder.charts, section.charts);
    holder.tables.replaceChildren(...(section.tables || []).map(paceline.table));
  }

  // The chosen step: a run, one of its steps, and what `load` says about it.
  class StepChooser {
    constructor(holder, load) {
      this.load = load;
      this.run = el("select", { id: "tail-run", onchange: () => this.showRun() });
      this.slider = el("input", { type: "range", id: "tail-slider", min: "0", "aria-label": "step, by position", oninput: () => this.choose(this.steps[Number(this.slider.value)]) });
      this.step = el("select", { id: "tail-step", onchange: () => this.choose(Number(this.step.value)) });
      this.charts = el("div", { class: "charts" });
      this.tables = el("div", {});
      this.runLabel = el("label", {}, "Run", this.run);
      holder.replaceChildren(
        el("h2", {}, "The long tail of one step"),
        el("p", { class: "muted" }, "A rollout ends when its longest response does. Here is one step's rollout: how many requests were still running, which strategy the engine decoded with, and how fast it was. Background colours are strategies: plain decoding, or a drafter with the number of tokens it proposes; faint ones are short trials."),
        el("div", { class: "controls" }, this.runLabel, el("label", {}, "Step", this.step), el("label", {}, "Move through the steps", this.slider)),
        this.charts, this.tables);
    }

    update(tails) {
      const before = this.run.value;
      const chosen = this.chosen;
      const wasLast = !this.steps || chosen === this.steps[this.steps.length - 1];
      this.tails = tails;
      this.runLabel.hidden = tails.length < 2;
      this.run.replaceChildren(...tails.map((tail) => el("option", { value: tail.run }, tail.run)));
      if (tails.some((tail) => tail.run === before)) this.run.value = before;
      this.fillSteps();
      if (!this.steps.length) return;
      const asked = tails.map((tail) => tail.chosen).find((step) => this.steps.includes(step));
      const last = this.steps[this.steps.length - 1];
      this.choose(chosen === undefined && asked !== undefined ? asked : !wasLast && this.steps.includes(chosen) ? chosen : last);
    }

    fillSteps() {
      const tail = this.tails.find((candidate) => candidate.run === this.run.value);
      this.steps = tail ? tail.steps : [];
      this.slider.max = String(Math.max(0, this.steps.length - 1));
      this.step.replaceChildren(...this.steps.map((step) => el("option", { value: step }, step)));
    }

    showRun() {
      this.fillSteps();
      if (this.steps.length) this.choose(this.steps[this.steps.length - 1]);
    }

    async choose(step) {
      this.chosen = step;
      this.step.value = String(step);
      this.slider.value = String(this.steps.indexOf(step));
      const view = await this.load(this.run.value, step);
      if (!view || this.chosen !== step) return;
      paceline.show(this.charts, view.charts);
      this.tables.replaceChildren(...view.tables.map(paceline.table));
    }
  }

  function marked(text, words) {
    if (!words) return [text];
    const parts = [];
    const small = text.toLowerCase();
    let from = 0;
    for (let at = small.indexOf(words); at >= 0 && parts.length < 200; at = small.indexOf(words, from)) {
      parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + words.length)));
      from = at + words.length;
    }
    return [...parts, text.slice(from)];
  }

  function responseOf(response, words) {
    const parts = Object.entries(response.components).map(([name, value]) => `${name} ${paceline.format(value, "")}`).join(", ");
    return el("div", { class: "response" },
      el("p", { class: "note" },
        el("span", { class: `badge ${response.correct ? "good" : "bad"}` }, response.correct ? "correct" : "wrong"),
        `reward ${paceline.format(response.reward, "")} · ${response.tokens} tokens · ended by ${response.finish}${parts ? ` · ${parts}` : ""}`),
      el("pre", { tabindex: "0" }, marked(response.text, words)),
      response.cut ? el("p", { class: "note" }, `cut here; the whole response has ${response.cut} characters and is in samples/`) : null);
  }

  class Samples {
    constructor(holder, load) {
      this.load = load;
      this.run = el("select", { id: "samples-run", onchange: () => this.refresh() });
      this.step = el("select", { id: "samples-step", onchange: () => this.refresh() });
      this.outcome = el("select", { id: "samples-outcome", onchange: () => this.refresh() }, el("option", { value: "" }, "all"), el("option", { value: "correct" }, "correct"), el("option", { value: "wrong" }, "wrong"));
      this.search = el("input", { type: "search", id: "samples-search", placeholder: "text of prompt or response", oninput: () => this.refresh() });
      this.count = el("p", { class: "note", role: "status" });
      this.list = el("div", { class: "panel" });
      this.runLabel = el("label", {}, "Run", this.run);
      holder.replaceChildren(
        el("h2", {}, "Sample responses"),
        el("p", { class: "muted" }, "What the policy wrote, as it wrote it, with the reward of each response."),
        el("div", { class: "controls" }, this.runLabel, el("label", {}, "Step", this.step), el("label", {}, "Outcome", this.outcome), el("label", {}, "Search", this.search)),
        this.count, this.list);
    }

    update(samples) {
      this.samples = samples;
      const keep = [this.run.value, this.step.value];
      this.runLabel.hidden = samples.length < 2;
      this.run.replaceChildren(...samples.map((entry) => el("option", { value: entry.run }, entry.run)));
      if (samples.some((entry) => entry.run === keep[0])) this.run.value = keep[0];
      const chosen = samples.find((entry) => entry.run === this.run.value);
      const steps = chosen ? chosen.steps : [];
      this.step.replaceChildren(el("option", { value: "" }, "all that are here"), ...steps.map((step) => el("option", { value: step }, step)));
      this.step.value = steps.some((step) => String(step) === keep[1]) ? keep[1] : steps.length ? String(steps[steps.length - 1]) : "";
      this.refresh();
    }

    async refresh() {
      const request = (this.request = Symbol());
      const groups = await this.load(this.run.value, this.step.value);
      if (request !== this.request || !groups) return;
      const words = this.search.value.toLowerCase();
      let found = 0;
      const shown = [];
      for (const group of groups) {
        const inPrompt = group.prompt.toLowerCase().includes(words);
        const responses = group.responses.filter((response) =>
          (!this.outcome.value || response.correct === (this.outcome.value === "correct")) && (!words || inPrompt || response.text.toLowerCase().includes(words)));
        found += responses.length;
        if (!responses.length || shown.length >= MOST_SAMPLES) continue;
        shown.push(el("div", { class: "sample" }, el("p", {}, el("strong", {}, `Step ${group.step}`), " · prompt ", el("code", {}, group.id)), el("pre", { tabindex: "0" }, marked(group.prompt, words)), responses.map((response) => responseOf(response, words))));
      }
      this.count.textContent = `${found} responses to ${groups.length} prompts` + (shown.length === MOST_SAMPLES ? `; the first ${MOST_SAMPLES} prompts are shown` : "");
      this.list.replaceChildren(...shown);
    }
  }

  // The whole page; `load` fetches what is not in the data itself.
  paceline.Page = class {
    constructor(root, load) {
      this.summary = el("section", { id: "summary" });
      this.tail = el("section", { id: "tail" });
      this.samplesSection = el("section", { id: "samples" });
      this.chooser = new StepChooser(this.tail, load.tail);
      this.samples = new Samples(this.samplesSection, load.samples);
      this.title = el("h1", {});
      this.subtitle = el("p", { class: "muted" });
      this.links = el("ul", {});
      this.main = el("main", { id: "main" }, this.summary);
      this.header = el("header", {}, this.title, this.subtitle);
      this.sections = new Map();
      root.replaceChildren(el("a", { class: "skip", href: "#main" }, "Skip to the content"), this.header, el("nav", { "aria-label": "Sections" }, this.links), this.main, el("footer", {}, el("p", {}, "Drag over a chart to zoom, double-click to see it whole; with the keyboard, arrow keys walk along the curves. Click a name in a legend to hide it.")));
    }

    update(data) {
      document.title = data.title;
      this.title.textContent = data.title;
      this.subtitle.textContent = data.subtitle;
      this.summary.hidden = !data.cards.length && !data.words.length;
      this.summary.replaceChildren(el("h2", {}, "Summary"), cardsOf(data.cards), ...data.words.map((text) => el("p", {}, text)), ...data.tables.map(paceline.table));
      const order = [];
      for (const section of data.sections) {
        let holder = this.sections.get(section.id);
        if (!holder) this.sections.set(section.id, (holder = el("section", { id: section.id })));
        if (!holder.isConnected) this.main.append(holder);
        fillSection(holder, section);
        order.push([section.id, section.short]);
      }
      for (const [id, holder] of this.sections) {
        if (!data.sections.some((section) => section.id === id)) holder.remove();
      }
      if (data.tails.some((tail) => tail.steps.length)) {
        if (!this.tail.isConnected) this.main.append(this.tail);
        this.chooser.update(data.tails);
        order.push(["tail", "One step"]);
      }
      if (data.samples.some((entry) => entry.steps.length)) {
        if (!this.samplesSection.isConnected) this.main.append(this.samplesSection);
        this.samples.update(data.samples);
        order.push(["samples", "Samples"]);
      }
      this.links.replaceChildren(...[...(this.summary.hidden ? [] : [["summary", "Summary"]]), ...order].map(([id, name]) => el("li", {}, el("a", { href: `#${id}` }, name))));
    }
  };
})();
