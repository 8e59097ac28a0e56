// Builds the page from the data that it carries: cards, sections of charts, a chosen step, samples, tables.
"use strict";
(function () {
  const el = paceline.element;
  const MOST_SAMPLES = 40; // prompts whose responses are shown at a time
  const POLL = 2000; // milliseconds between two questions for newer data
  const TAIL = `A rollout ends when its longest response does. Here is one step's rollout: how many requests were
    still running, which strategy the engine decoded with, and how fast it was. Background colours are strategies:
    plain decoding, or a drafter with the number of tokens it proposes; faint ones are short trials.`;
  const SAMPLES = "What the policy wrote, as it wrote it, with the reward of each response.";
  const FOOTER = `Drag over a chart to zoom, double-click to see it whole; with the keyboard, arrow keys walk along
    the curves. Click a name in a legend to hide it.`;

  // On a phone the summary and what was learned are open, and every other section unfolds at a touch.
  const NARROW = matchMedia("(max-width: 620px)").matches;

  const section = (id, title, intro, ...parts) => {
    const open = !NARROW || id === "learning";
    const heading = el("summary", {}, el("h2", {}, title));
    return el("section", { id }, el("details", { class: "fold", open }, heading,
      intro ? el("p", { class: "muted" }, intro) : null, ...parts));
  };
  const unfold = (id) => document.querySelector(`#${id} > details.fold`)?.setAttribute("open", "");
  const controls = (...pairs) =>
    el("div", { class: "controls" }, pairs.map(([name, node]) => el("label", {}, name, node)));
  const note = (...parts) => el("p", { class: "note" }, ...parts);

  function cardOf({ question, verdict, detail, tone, shares }) {
    const said = shares.map(([name, share]) => `${name} ${Math.round(100 * share)}%`);
    const pieces = shares.map(([, share, colour]) => {
      const piece = paceline.swatch(paceline.colour(colour), "piece");
      piece.style.width = `${100 * share}%`;
      return piece;
    });
    const keyOf = ([, , colour], i) => el("li", {}, paceline.swatch(paceline.colour(colour), "wide"), said[i]);
    const bar = el("div", { class: "share", role: "img", "aria-label": said.join(", ") }, pieces);
    const parts = shares.length ? [bar, el("ul", { class: "keys" }, shares.map(keyOf))] : [];
    const verdictLine = el("p", { class: "verdict" }, verdict);
    return el("div", { class: `card ${tone}` }, el("h3", {}, question), verdictLine, parts, el("p", {}, detail));
  }

  function tableOf({ id, title, note: said, columns, rows, text }) {
    const cell = (value, i) => (i ? el("td", { class: text.includes(i) ? "text" : "" }, value)
      : el("th", { scope: "row" }, value));
    const head = el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name))));
    const body = el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))));
    const table = el("div", { class: "scroll" }, el("table", {}, head, body));
    return el("div", { class: "panel", id: `table-${id}` }, el("h3", {}, title), said ? note(said) : null, table);
  }

  // A select of all steps of all runs. It stays where it is when steps are added, or at the last one.
  class StepSelect {
    constructor(id, onchange) {
      this.node = el("select", { id, onchange });
      this.entries = [];
    }

    get chosen() {
      return this.entries[this.node.selectedIndex];
    }

    // Fills in the steps and returns whether another one is chosen now.
    fill(runs, wanted) {
      const before = this.chosen;
      const same = (entry) => before && entry.run === before.run && entry.step === before.step;
      const following = this.node.selectedIndex === this.entries.length - 1;
      this.entries = runs.flatMap(({ run, steps }) => steps.map((step) => ({ run, step })));
      const label = ({ run, step }) => (runs.length > 1 ? `${run}: step ${step}` : `step ${step}`);
      this.node.replaceChildren(...this.entries.map((entry) => el("option", {}, label(entry))));
      const place = this.entries.findIndex((entry) => (following ? entry.step === wanted : same(entry)));
      this.node.selectedIndex = place < 0 ? this.entries.length - 1 : place;
      return !same(this.chosen);
    }
  }

  class Tail {
    constructor() {
      this.select = new StepSelect("tail-step", () => this.show());
      this.charts = el("div", { class: "charts" });
      this.tables = el("div", {});
      const chooser = controls(["Step", this.select.node]);
      this.node = section("tail", "The long tail of one step", TAIL, chooser, this.charts, this.tables);
    }

    update(tails) {
      this.tails = tails;
      if (this.select.fill(tails, tails[0].chosen)) this.show();
    }

    show() {
      const { run, step } = this.select.chosen;
      const view = this.tails.find((tail) => tail.run === run).views[step];
      paceline.show(this.charts, view.charts);
      this.tables.replaceChildren(...view.tables.map(tableOf));
    }
  }

  function responseOf({ correct, reward, tokens, finish, components, text, cut }) {
    const parts = Object.entries(components).map(([name, value]) => `${name} ${paceline.format(value, "")}`);
    const said = [`reward ${paceline.format(reward, "")}`, `${tokens} tokens`, `ended by ${finish}`, ...parts];
    const [tone, verdict] = correct ? ["good", "correct"] : reward > 0 ? ["", "in part"] : ["bad", "wrong"];
    const badge = el("span", { class: `badge ${tone}` }, verdict);
    const rest = cut ? note(`cut here; the whole response has ${cut} characters and is in samples/`) : null;
    return el("div", {}, note(badge, said.join(" · ")), el("pre", { tabindex: "0" }, text), rest);
  }

  class Samples {
    constructor() {
      const onchange = () => this.show();
      this.select = new StepSelect("samples-step", onchange);
      this.all = el("input", { type: "checkbox", id: "samples-all", onchange });
      const outcomes = ["all", "correct", "not correct"].map((name) => el("option", {}, name));
      this.outcome = el("select", { id: "samples-outcome", onchange }, outcomes);
      this.search = el("input", { type: "search", id: "samples-search", oninput: onchange });
      this.count = el("p", { class: "note", role: "status" });
      this.list = el("div", { class: "panel" });
      const chooser = controls(["Step", this.select.node], ["All steps", this.all], ["Outcome", this.outcome],
        ["Text of prompt or response", this.search]);
      this.node = section("samples", "Sample responses", SAMPLES, chooser, this.count, this.list);
    }

    update(samples) {
      this.groups = samples.flatMap(({ run, groups }) => groups.map((group) => ({ run, ...group })));
      if (this.select.fill(samples)) this.show();
    }

    show() {
      const { run, step } = this.select.chosen;
      const words = this.search.value.toLowerCase();
      const has = (text) => text.toLowerCase().includes(words);
      const wanted = (group, { correct, text }) => (has(group.prompt) || has(text))
        && (this.outcome.value === "all" || correct === (this.outcome.value === "correct"));
      const found = this.groups
        .filter((group) => this.all.checked || (group.run === run && group.step === step))
        .map((group) => ({ ...group, responses: group.responses.filter((one) => wanted(group, one)) }))
        .filter((group) => group.responses.length);
      const total = found.reduce((sum, group) => sum + group.responses.length, 0);
      const cut = found.length > MOST_SAMPLES ? `; the first ${MOST_SAMPLES} prompts are shown` : "";
      this.count.textContent = `${total} responses to ${found.length} prompts${cut}`;
      this.list.replaceChildren(...found.slice(0, MOST_SAMPLES).map((group, i) => {
        const rewards = group.responses.map(({ reward }) => paceline.format(reward, "")).join(", ");
        const head = [`Step ${group.step} · `, el("code", {}, group.id), ` · rewards ${rewards}`];
        return el("details", { class: "sample", open: i === 0 || words !== "" }, el("summary", {}, ...head),
          el("pre", { tabindex: "0" }, group.prompt), group.responses.map(responseOf));
      }));
    }
  }

  class Section {
    constructor({ id, title, intro }) {
      [this.charts, this.more] = [el("div", { class: "charts" }), el("div", { class: "charts" })];
      this.text = el("pre", { class: "figures", tabindex: "0" });
      this.tables = el("div", {});
      this.label = el("summary", {});
      this.fold = el("details", { class: "more" }, this.label, this.more);
      this.node = section(id, title, intro, this.text, this.charts, this.tables, this.fold);
    }

    update({ charts, more, text, tables }) {
      this.text.textContent = text;
      this.text.hidden = !text;
      this.fold.hidden = !more.length;
      this.label.textContent = `${more.length} more`;
      paceline.show(this.charts, charts);
      paceline.show(this.more, more);
      this.tables.replaceChildren(...tables.map(tableOf));
    }
  }

  const parts = new Map();
  const summary = el("section", { id: "summary" });
  const [title, subtitle, links] = [el("h1", {}), el("p", { class: "muted" }), el("ul", {})];
  const main = el("main", { id: "main" }, summary);
  const skip = el("a", { class: "skip", href: "#main" }, "Skip to the content");
  document.getElementById("page").replaceChildren(skip, el("header", {}, title, subtitle),
    el("nav", { "aria-label": "Sections" }, links), main, el("footer", {}, el("p", {}, FOOTER)));
  let state = "";

  function show(data) {
    state = data.live;
    document.title = title.textContent = data.title;
    subtitle.textContent = data.subtitle;
    const cards = el("div", { class: "cards" }, data.cards.map(cardOf));
    const words = data.words.map((text) => el("p", {}, text));
    summary.replaceChildren(el("h2", {}, "Summary"), cards, ...words, ...data.tables.map(tableOf));
    summary.hidden = !data.cards.length;
    const hasSteps = (runs) => runs.some((run) => run.steps.length);
    const shown = [
      ...data.sections.map((one) => [one.id, one.short, Section, one]),
      ...(hasSteps(data.tails) ? [["tail", "One step", Tail, data.tails]] : []),
      ...(hasSteps(data.samples) ? [["samples", "Samples", Samples, data.samples]] : []),
    ];
    let above = summary;
    for (const [id, , Kind, content] of shown) {
      if (!parts.has(id)) {
        parts.set(id, new Kind(content));
        above.after(parts.get(id).node);
      }
      above = parts.get(id).node;
      parts.get(id).update(content);
    }
    const names = [...(summary.hidden ? [] : [["summary", "Summary"]]), ...shown];
    links.replaceChildren(...names.map(([id, name]) => el("li", {},
      el("a", { href: `#${id}`, onclick: () => unfold(id) }, name))));
  }

  // A page that `report --serve` sent asks whether there is something new.
  async function follow() {
    const answer = await fetch("/data", { headers: { "If-None-Match": state } }).catch(() => null);
    if (answer && answer.status === 200) show(await answer.json());
    setTimeout(follow, POLL);
  }

  show(JSON.parse(document.getElementById("data").textContent));
  if (state) setTimeout(follow, POLL);
})();
