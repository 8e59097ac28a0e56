// The dashboard: chooses runs, shows their views, and follows them while they grow.
"use strict";
(function () {
  const el = paceline.element;
  const token = new URLSearchParams(location.search).get("token");
  let chosen = [];
  let events = null;

  function address(path, parameters) {
    const query = new URLSearchParams(parameters);
    if (token) query.set("token", token);
    return `${path}?${query}`;
  }

  async function get(path, parameters) {
    const answer = await fetch(address(path, parameters));
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || answer.statusText);
    return answer.json();
  }

  const page = new paceline.Page(document.getElementById("page"), {
    tail: (run, step) => get("/api/tail", { run, step }),
    samples: (run, step) => (step ? get("/api/samples", { run, step }) : Promise.resolve([])),
  });

  const list = el("ul", { class: "runs" });
  const follow = el("input", { type: "checkbox", id: "follow", checked: true, onchange: connect });
  const state = el("span", { class: "muted", role: "status" });
  const filter = el("input", { type: "search", id: "run-filter", placeholder: "part of a name", oninput: () => filterRuns() });
  const panel = el("details", { class: "panel", id: "runs", open: true },
    el("summary", {}, "Runs"),
    el("div", { class: "controls" }, el("label", {}, "Find", filter), el("span", {}, follow, el("label", { for: "follow", class: "inline" }, " follow while it runs"))),
    list);
  page.header.append(panel, state);

  function filterRuns() {
    const words = filter.value.toLowerCase();
    for (const item of list.children) item.hidden = !item.dataset.name.toLowerCase().includes(words);
  }

  async function listRuns() {
    const runs = await get("/api/runs", {});
    list.replaceChildren(...runs.map((run) => {
      const box = el("input", { type: "checkbox", value: run.name, checked: chosen.includes(run.name), onchange: choose });
      const when = new Date(1000 * run.changed).toLocaleString();
      return el("li", { "data-name": run.name }, el("label", {}, box, ` ${run.name} `, el("span", { class: "muted" }, when)));
    }));
    filterRuns();
    return runs;
  }

  function choose() {
    chosen = [...list.querySelectorAll("input:checked")].map((box) => box.value);
    connect();
  }

  function show(view) {
    const begun = performance.now();
    page.update(view);
    document.body.dataset.updateMilliseconds = (performance.now() - begun).toFixed(1);
    document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
    state.textContent = `updated ${new Date().toLocaleTimeString()}`;
  }

  async function connect() {
    if (events) events.close();
    events = null;
    if (!chosen.length) {
      state.textContent = "Choose a run.";
      return;
    }
    const parameters = chosen.map((name) => ["run", name]);
    try {
      if (!follow.checked) return show(await get("/api/view", parameters));
      events = new EventSource(address("/events", parameters));
      events.addEventListener("view", (event) => show(JSON.parse(event.data)));
      events.onerror = () => { state.textContent = "The connection is lost; trying again."; };
    } catch (error) {
      state.textContent = error.message;
    }
  }

  listRuns().then((runs) => {
    if (!runs.length) {
      state.textContent = "There is no run here yet; it appears when one begins.";
      setTimeout(() => location.reload(), 5000);
      return;
    }
    list.querySelector("input").checked = true;
    choose();
    setInterval(() => listRuns().catch(() => {}), 10000);
  }).catch((error) => { state.textContent = error.message; });
})();
