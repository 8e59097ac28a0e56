// Shows the data that a page carries itself.
"use strict";
(function () {
  const data = paceline.data("data");
  const page = new paceline.Page(document.getElementById("page"), {
    tail: async (run, step) => data.tails.find((tail) => tail.run === run).views[step],
    samples: async (run, step) => {
      const entry = data.samples.find((candidate) => candidate.run === run) || { groups: [] };
      return entry.groups.filter((group) => !step || String(group.step) === step);
    },
  });
  page.update(data);
})();
