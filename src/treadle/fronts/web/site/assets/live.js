(() => {
  "use strict";
  const { treadle } = window;
  const PERIOD_MS = 1000;
  const RATE_S = 4; // rates are averages over this long
  const KEPT = 120; // points of the curve
  const MOST_ROWS = 50;
  const UNREADY = ["starting", "restarting", "draining", "stopping"];
  const SILENT_S = 5; // without a step while something runs
  const at = (id) => document.getElementById(id);
  const put = (id, text) => {
    const place = at(id);
    if (place.textContent !== text) place.textContent = text;
  };
  const whole = (n) => Math.round(n || 0).toLocaleString("en-US");
  const percent = (part) => `${(100 * part).toFixed(part && part < 0.1 ? 1 : 0)} %`;

  function bytes(n) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    for (n = n || 0; Math.round(n) >= 1024 && i < 4; i++) n /= 1024;
    return `${i > 2 || (i && n < 9.95) ? n.toFixed(1) : Math.round(n)}\u00a0${units[i]}`;
  }

  function span(s) {
    if (s < 10) return `${Number.isInteger(s) ? s : s.toFixed(1)} s`;
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = parts.findIndex(([size]) => s >= size);
    const [[large, name], small] = [parts[first], parts[first + 1]];
    const rest = small ? Math.floor((s % large) / small[0]) : 0;
    return `${Math.floor(s / large)} ${name}${rest ? ` ${rest} ${small[1]}` : ""}`;
  }

  // State ------------------------------------------------------------------------------------------------------

  function state(name, why) {
    const label = name === "starting" ? "loading" : name === "silent" ? "not answering" : name;
    const text = label[0].toUpperCase() + label.slice(1);
    put("state", text);
    at("state").className = `state ${name === "ready" && why ? "stalled" : name}`;
    put("why", why);
    at("why").hidden = !why;
    at("effect").hidden = !UNREADY.includes(name);
    at("live").classList.toggle("old", name === "silent");
    document.title = `${name === "ready" ? "" : `${text}: `}${at("model").textContent} · Treadle`;
  }

  function why(status) {
    const oldest = Math.max(0, ...status.requests.map((request) => request.age_s));
    const silent = Math.min(oldest, status.engine.last_heard_s ?? 0);
    if (status.reason || silent < SILENT_S) return status.reason;
    return `The engine has reported no step for ${span(Math.floor(silent))} while requests wait for it.`;
  }

  // Rates ------------------------------------------------------------------------------------------------------

  let samples = [];
  const curve = [];

  function rates(status) {
    const counted = status.engine.statistics || {};
    const sample = {
      at: status.uptime_s,
      pid: status.engine.pid,
      made: counted.completion_tokens || 0,
      read: counted.prompt_tokens || 0,
    };
    const last = samples.at(-1);
    if (last && (last.pid !== sample.pid || last.at > sample.at || last.made > sample.made)) samples = [];
    samples.push(sample);
    while (samples.length > 2 && sample.at - samples[1].at >= RATE_S) samples.shift();
    const first = samples[0];
    const passed = sample.at - first.at;
    if (!passed) return null;
    return { made: (sample.made - first.made) / passed, read: (sample.read - first.read) / passed };
  }

  function draw(rate) {
    curve.push(rate);
    if (curve.length > KEPT) curve.shift();
    const top = Math.max(1, ...curve);
    const points = curve.map((value, i) => `${KEPT - curve.length + i + 1} ${(58 - (54 * value) / top).toFixed(1)}`);
    const [line, area] = at("spark").querySelectorAll("path");
    line.setAttribute("d", `M${points.join("L")}`);
    area.setAttribute("d", `M${KEPT - curve.length + 1} 60L${points.join("L")}L${KEPT} 60Z`);
  }

  // Figures ----------------------------------------------------------------------------------------------------

  function of(id, value, limit) {
    const small = document.createElement("small");
    small.textContent = limit;
    at(id).replaceChildren(value, small);
  }

  function figures(status) {
    const { admission, engine, prefix_cache: prefix, event_loop_lag: lag, capabilities: can } = status;
    const rate = rates(status);
    if (rate) draw(rate.made);
    put("made", rate ? rate.made.toFixed(rate.made < 100 ? 1 : 0) : "–");
    put("read", rate ? `prompts: ${rate.read.toFixed(0)} tokens/s` : "");
    of("running", whole(admission.running), ` of ${whole(admission.capacity)}`);
    of("waiting", whole(admission.waiting), ` of ${whole(admission.max_waiting)}`);
    put("oldest", admission.waiting ? `oldest for ${span(admission.oldest_wait_s)}` : "");
    const held = admission.rows ? engine.statistics?.runner?.kv_bytes : 0; // the last step's figure is of its own rows
    of("kv", can ? bytes(held) : "–", can?.kv_budget_bytes ? ` of ${bytes(can.kv_budget_bytes)}` : "");
    put("prefixes", !can ? "" : prefix.enabled ? `cached prompts: ${bytes(prefix.held_bytes)}` : "prefix cache off");
    put("reused", prefix.looked_up_tokens ? percent(prefix.hit_rate) : "–");
    put("found", prefix.looked_up_tokens ? `${whole(prefix.reused_tokens)} of ${whole(prefix.looked_up_tokens)} tokens` : "");
    put("accepted", whole(admission.accepted));
    const refused = Object.entries(admission.refused).filter(([, count]) => count);
    put("refused", refused.map(([reason, count]) => `${whole(count)} refused: ${reason.replaceAll("_", " ")}`).join(", ") || "none refused");
    put("uptime", span(Math.floor(status.uptime_s)));
    put("restarts", `engine restarts: ${whole(engine.restarts)}`);
    put("lag", `event-loop lag p99: ${lag.p99_ms.toFixed(1)} ms`);
  }

  function row(request) {
    const done = request.prompt_tokens_done ?? 0;
    const prompt = done < request.prompt_tokens ? `${whole(done)} / ` : "";
    const cells = [
      ["id mono", request.id],
      ["slim", request.kind],
      ["", request.phase],
      ["n", `${prompt}${whole(request.prompt_tokens)}`],
      ["n slim", whole(request.cached_tokens)],
      ["n", `${whole(request.completion_tokens)} / ${whole(request.max_tokens)}`],
      ["n", span(request.age_s)],
    ];
    const line = document.createElement("tr");
    for (const [name, text] of cells) {
      const cell = line.insertCell();
      cell.className = name;
      cell.textContent = text;
      if (text === request.id) cell.title = text;
    }
    return line;
  }

  function requests(all) {
    const shown = [...all].sort((a, b) => b.age_s - a.age_s).slice(0, MOST_ROWS);
    at("rows").replaceChildren(...shown.map(row));
    at("requests").hidden = !all.length;
    put("more", all.length > MOST_ROWS ? `and ${whole(all.length - MOST_ROWS)} more` : all.length ? "" : "No request is running.");
  }

  // The page's own parts, once the server knows more of its model than when it made the page -----------------

  async function refresh() {
    const answer = await treadle.get(`${treadle.root}/`, "text/html");
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ["model", "about", "connect"]) {
      const part = document.importNode(fresh.getElementById(id), true);
      treadle.address(part);
      at(id).replaceWith(part);
    }
  }

  async function show(status) {
    const about = at("about").dataset;
    if (about.model !== status.model || (about.known === "no" && status.ready)) await refresh();
    state(status.state, why(status));
    figures(status);
    requests(status.requests);
  }

  // Time -------------------------------------------------------------------------------------------------------

  let heard = new Date(); // the last answer
  let silent = false;
  let timer = 0;

  async function look() {
    try {
      const answer = await treadle.get(`${treadle.root}/v1/status`, "application/json");
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      await show(await answer.json());
      heard = new Date();
      silent = false;
    } catch (error) {
      silent = true;
      samples = [];
      const figure = /^HTTP/.test(error.message) ? ` (${error.message})` : "";
      const since = heard.toLocaleTimeString();
      state("silent", `The server has not answered since ${since}${figure}. The figures below are its last.`);
    }
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(look, silent ? 2 * PERIOD_MS : PERIOD_MS);
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    samples = [];
    if (!document.hidden) look();
  });
  look();
})();
