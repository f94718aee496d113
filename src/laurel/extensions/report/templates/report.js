"use strict";
// Sorting, searching and turning the pages of sample tables; themes; and, while a run is followed,
// newer versions of the page, without losing what its reader was doing.
(() => {
  const PAGE = 25;
  const SHORT = 40; // letters of a text that needs no width of its own
  const root = document.documentElement;
  const collator = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });

  // ------------------------------------------------------------------------- sample tables

  const states = new Map(); // what the reader chose, by the id of the table

  function setUpTable(table) {
    const data = JSON.parse(document.getElementById(`${table.id}-rows`).textContent);
    const state = states.get(table.id) ?? { query: "", column: -1, down: false, page: 0 };
    states.set(table.id, state);
    const part = (name) => document.getElementById(`${table.id}-${name}`);
    let texts = null; // what is searched in: made when it is first asked for
    let shown = [];

    function choose() {
      const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
      if (words.length && texts === null) {
        // Numbers are sorted by, not searched in: 3 is in too many of them.
        const isText = (_, column) => data.kinds[column] === "text";
        texts = data.rows.map((row) => row.filter(isText).join("\n").toLowerCase());
      }
      const numbers = data.rows.map((_, index) => index);
      shown = words.length
        ? numbers.filter((index) => words.every((word) => texts[index].includes(word)))
        : numbers;
      if (state.column >= 0) shown.sort(compare);
    }

    function compare(left, right) {
      const a = data.rows[left][state.column], b = data.rows[right][state.column];
      const none = (value) => value === null || value === "";
      // What has no value stands at the end, whichever way is sorted.
      if (none(a) || none(b)) return none(a) - none(b) || left - right;
      const order = data.kinds[state.column] === "number" ? a - b : collator.compare(a, b);
      return (state.down ? -order : order) || left - right;
    }

    function cell(value, column) {
      const td = document.createElement("td");
      td.dataset.label = data.columns[column];
      if (value === null || value === "") return td;
      if (data.kinds[column] === "number") {
        td.className = "number";
        td.append(written(value));
      } else {
        td.className = "text";
        const inner = document.createElement("div");
        inner.className = value.length > SHORT ? "long" : "";
        inner.textContent = value;
        td.append(inner);
      }
      return td;
    }

    function render() {
      const pages = Math.max(1, Math.ceil(shown.length / PAGE));
      state.page = Math.min(state.page, pages - 1);
      const start = state.page * PAGE;
      const rows = shown.slice(start, start + PAGE).map((index) => {
        const tr = document.createElement("tr");
        tr.append(...data.rows[index].map(cell));
        return tr;
      });
      table.tBodies[0].replaceChildren(...rows);
      part("count").textContent = shown.length
        ? `${start + 1} to ${start + rows.length} of ${shown.length.toLocaleString("en")}`
        : "nothing found";
      part("back").disabled = state.page === 0;
      part("on").disabled = state.page >= pages - 1;
      [...table.tHead.rows[0].cells].forEach((th, column) => {
        const way = state.down ? "descending" : "ascending";
        th.setAttribute("aria-sort", column === state.column ? way : "none");
      });
      part("column").value = String(state.column);
      part("way").textContent = state.down ? "▼ descending" : "▲ ascending";
      part("way").disabled = state.column < 0;
    }

    function change(changes) {
      Object.assign(state, { page: 0 }, changes);
      choose();
      render();
    }

    data.columns.forEach((name, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      // Numbers are first asked for from the top, names from A.
      const first = data.kinds[column] === "number";
      button.addEventListener("click", () => {
        change({ column, down: state.column === column ? !state.down : first });
      });
      table.tHead.rows[0].cells[column].replaceChildren(button);
      part("column").append(new Option(name, String(column)));
    });
    part("search").value = state.query;
    part("search").addEventListener("input", (event) => change({ query: event.target.value }));
    part("column").addEventListener("change", (event) => {
      const column = Number(event.target.value);
      change({ column, down: column >= 0 && data.kinds[column] === "number" });
    });
    part("way").addEventListener("click", () => change({ down: !state.down }));
    part("back").addEventListener("click", () => { state.page -= 1; render(); });
    part("on").addEventListener("click", () => { state.page += 1; render(); });
    part("controls").hidden = false;
    choose();
    render();
  }

  function written(value) {
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const digits = Math.abs(value) >= 1e-4 && Math.abs(value) < 1e9;
    return digits ? value.toLocaleString("en", { maximumSignificantDigits: 4 })
      : value.toExponential(2);
  }

  function setUp() {
    const tables = [...document.querySelectorAll("table.samples")];
    for (const table of tables) {
      const details = table.closest("details");
      // A table that nobody has opened costs nothing.
      if (!details || details.open) setUpTable(table);
      else {
        const opened = () => {
          if (!details.open) return;
          details.removeEventListener("toggle", opened);
          setUpTable(table);
        };
        details.addEventListener("toggle", opened);
      }
    }
  }

  // ------------------------------------------------------------------------- how it looks

  document.getElementById("theme").addEventListener("change", (event) => {
    root.dataset.theme = event.target.value;
  });
  document.getElementById("curves").addEventListener("change", (event) => {
    root.dataset.curves = event.target.value;
  });
  document.getElementById("looks").hidden = false;
  setUp();
  root.dataset.ready = "yes";
  performance.mark("report-usable");

  // ------------------------------------------------------------------------- following a run

  const live = document.getElementById("live");
  if (!live) return;
  let version = Number(live.dataset.version);
  let typed = 0;
  document.addEventListener("input", () => { typed = Date.now(); });

  async function ask() {
    let state;
    try {
      state = await (await fetch("state", { cache: "no-store" })).json();
    } catch {
      live.textContent = "The server has ended; the page stays as it is.";
      return;
    }
    // A reader who is typing is not disturbed.
    if (state.version !== version && Date.now() - typed > 1500) {
      try {
        await renew();
        version = state.version;
      } catch {
        // The next question comes soon.
      }
    }
    live.textContent = state.text;
    if (!state.ended || state.version !== version) setTimeout(ask, 1000 * live.dataset.seconds);
  }

  async function renew() {
    const response = await fetch("./", { cache: "no-store" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const fresh = page.querySelector("main");
    const old = document.querySelector("main");
    for (const details of old.querySelectorAll("details[id]")) {
      const same = page.getElementById(details.id);
      if (same) same.open = details.open;
    }
    const focused = document.activeElement;
    const id = old.contains(focused) ? focused.id : "";
    const selection = id && "selectionStart" in focused
      ? [focused.selectionStart, focused.selectionEnd] : null;
    const place = scrollY;
    const sideways = [...old.querySelectorAll(".scroll[id]")].map((e) => [e.id, e.scrollLeft]);
    old.replaceWith(document.adoptNode(fresh));
    setUp();
    for (const [name, left] of sideways) {
      const same = document.getElementById(name);
      if (same) same.scrollLeft = left;
    }
    const again = id && document.getElementById(id);
    if (again) {
      again.focus({ preventScroll: true });
      if (selection && selection[0] !== null) again.setSelectionRange(...selection);
    }
    scrollTo(scrollX, place);
  }

  setTimeout(ask, 1000 * live.dataset.seconds);
})();
