"use strict";
(function () {
  var root = document.documentElement;
  function dark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function remember(theme) {
    try {
      if (theme === undefined) return localStorage.getItem("dpoptim-theme");
      localStorage.setItem("dpoptim-theme", theme);
    } catch (refused) { /* a browser may forbid storage: the choice then lasts as long as the page */ }
    return null;
  }
  var button = document.getElementById("theme");
  function name() { button.textContent = dark() ? "Light" : "Dark"; }
  var kept = remember();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.hidden = false;
  button.addEventListener("click", function () {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
    name();
  });
  name();

  root.classList.add("live");
  document.querySelectorAll("figure").forEach(function (figure) {
    var plot = figure.querySelector("svg.plot");
    var rows = Array.from(figure.querySelectorAll("tbody tr[data-x]"));
    if (!plot || !rows.length) return;
    var heads = Array.from(figure.querySelectorAll("thead th")).map(function (cell) { return cell.textContent; });
    var steps = rows.map(function (row) { return Number(row.dataset.x); });
    var cursor = plot.querySelector(".cursor"), readout = figure.querySelector(".readout"), at = rows.length - 1;
    var left = Number(plot.dataset.left), width = Number(plot.dataset.right) - left;
    var low = Number(plot.dataset.low), span = Number(plot.dataset.high) - low;
    function show(place) {
      at = Math.min(Math.max(place, 0), rows.length - 1);
      var cells = Array.from(rows[at].children).map(function (cell) { return cell.textContent; });
      var parts = cells.slice(1).map(function (text, i) {
        return text === "" ? "" : cells.length > 2 ? heads[i + 1] + " " + text : text;
      });
      readout.textContent = "step " + cells[0] + ": " + parts.filter(Boolean).join(" · ");
      cursor.setAttribute("transform", "translate(" + (left + (steps[at] - low) / span * width) + " 0)");
      cursor.classList.add("on");
    }
    function hide() { readout.textContent = ""; cursor.classList.remove("on"); }
    function point(event) {
      var box = plot.getBoundingClientRect();
      var step = low + ((event.clientX - box.left) / box.width * plot.viewBox.baseVal.width - left) / width * span;
      var best = 0;
      steps.forEach(function (each, i) { if (Math.abs(each - step) < Math.abs(steps[best] - step)) best = i; });
      show(best);
    }
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", function (event) { if (event.pointerType === "mouse") hide(); });
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", function (event) {
      var move = { ArrowLeft: -1, ArrowRight: 1, Home: -rows.length, End: rows.length }[event.key];
      if (move) { event.preventDefault(); show(cursor.classList.contains("on") ? at + move : at); }
    });
  });

  document.querySelectorAll("button.copy").forEach(function (copy) {
    var text = copy.parentElement.querySelector("pre");
    copy.hidden = false;
    copy.addEventListener("click", function () {
      getSelection().selectAllChildren(text);
      if (navigator.clipboard) {
        navigator.clipboard.writeText(text.textContent).then(function () { copy.textContent = "Copied"; }, function () {});
      }
    });
  });

  addEventListener("beforeprint", function () {
    document.querySelectorAll("details.print").forEach(function (each) { each.open = true; });
  });
})();
