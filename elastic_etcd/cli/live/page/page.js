// The page of elastic-etcd serve. All that is shown goes through `shown` and into text nodes:
// names and messages are other people's.
"use strict";

const root = document.documentElement.dataset.root;
const inJob = root === "../";
const job = inJob ? decodeURIComponent(location.pathname.split("/").pop()) : "";
const told = {};  // by event, what came last
const AGAIN = 3000;  // milliseconds until a lost connection is tried again

// --- elements ---------------------------------------------------------------------------

function shown(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) =>
    c === "\n" || c === "\t" ? c : `\\u{${c.codePointAt(0).toString(16)}}`);
}

function put(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children.flat()) {
    if (child !== null && child !== undefined)
      node.append(child instanceof Node ? child : shown(child));
  }
  return node;
}

const el = (name, attributes = {}, ...children) =>
  put(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  put(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

function table(kind, heads, rows) {
  return el("table", {class: kind},
    el("thead", {}, el("tr", {}, heads.map(([text, how]) => el("th", {class: how}, text)))),
    el("tbody", {}, rows));
}

function cell(how, text, of) {
  return el("td", of ? {class: how, "data-of": of} : {class: how}, text);
}

// --- texts ------------------------------------------------------------------------------

const two = (number) => String(number).padStart(2, "0");
const clock = (ms) => {
  const at = new Date(ms);
  return `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}:${two(at.getUTCSeconds())}`;
};
const day = (ms) => new Date(ms).toISOString().slice(0, 10);
const when = (text) => (Date.parse(text) ? `${day(Date.parse(text))} ${clock(Date.parse(text))}` : "");

function lasted(ms) {
  const s = ms / 1000;
  if (!(s >= 0)) return "";
  if (s < 60) return `${s.toFixed(1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

function span(ranks) {
  if (!ranks.length) return "-";
  return ranks.length === 1 ? String(ranks[0]) : `${ranks[0]}-${ranks[ranks.length - 1]}`;
}

function sizes(limits) {
  if (!limits) return "";
  if (limits.sizes.length) return limits.sizes.join(", ");
  return limits.min_nodes === limits.max_nodes ? String(limits.min_nodes) : `${limits.min_nodes} to ${limits.max_nodes}`;
}

function badge(state) {
  const named = state.hangs_since === null ? state.state : "hangs";
  const kind = {failed: "bad", hangs: "bad", succeeded: "good", training: "good"}[named] || "warn";
  return el("span", {class: `badge ${kind}`}, {good: "● ", warn: "◐ ", bad: "✕ "}[kind] + named);
}

const rate = (value) => (value === null ? "-" : value.toFixed(2));
const counted = (limits) => limits && limits.max_restarts < 2 ** 31;  // torchrun counts its own
const budget = (state) => `${state.restarts}${counted(state.limits) ? ` of ${state.limits.max_restarts}` : ""}`;
const signals = {1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"};
const ended = (code) => code < 0 ? `was killed by ${signals[-code] || `signal ${-code}`}` : `exited ${code}`;
const failed = (f) => f.hang || `rank ${f.rank} on ${f.node} ${ended(f.code)}`;

// --- all jobs ---------------------------------------------------------------------------

function drawJobs({prefix, jobs}) {
  document.getElementById("where").textContent = shown(prefix);
  const rows = jobs.map((state) => el("tr", {},
    el("td", {class: "name"}, el("a", {href: `jobs/${encodeURIComponent(state.job)}`}, state.job)),
    el("td", {class: "short"}, badge(state)),
    cell("n", Object.entries(state.nodes).map(([how, count]) => `${count} ${how}`).join(", ") || "-", "nodes"),
    cell("n", state.world_size, "world"),
    cell("n", rate(state.steps_per_second), "steps/s"),
    cell("n", state.generation, "generation"),
    cell("n", budget(state), "restarts"),
    cell("rest quiet", [state.why, state.last_words].filter(Boolean).join(": "))));
  show(el("section", {}, el("h1", {}, jobs.length === 1 ? "1 job" : `${jobs.length} jobs`),
    jobs.length
      ? table("wide", [["job"], ["state"], ["nodes", "n"], ["world size", "n"], ["steps/s", "n"],
                       ["generation", "n"], ["restarts", "n"], ["because"]], rows)
      : el("p", {class: "quiet"}, `No job is under ${prefix} in etcd. One that begins appears here.`)));
}

// --- one job ----------------------------------------------------------------------------

const parts = {};  // of a job's page, by name

function drawJob(state) {
  document.title = state ? `${shown(job)}: ${shown(state.state)}` : shown(job);
  if (!state) {
    delete parts.head;
    show(el("section", {}, el("h1", {}, job),
      el("p", {class: "quiet"}, "etcd has no such job. When it begins it appears here.")));
    return;
  }
  if (!parts.head) {
    for (const name of ["head", "cause", "nodes", "events", "timeline"]) parts[name] = el("div");
    show(...Object.values(parts));
  }
  parts.head.replaceChildren(head(state));
  parts.cause.replaceChildren(...cause(state));
  parts.nodes.replaceChildren(nodes(state));
  parts.events.replaceChildren(events(state));
  keepOpen(parts.timeline, () => parts.timeline.replaceChildren(timeline(state)));
}

function head(state) {
  const training = state.nodes.filter((node) => node.state === "training");
  const steps = state.nodes.filter((node) => node.pace).map((node) => node.pace.step);
  const tile = (name, value, more) => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null));
  return el("section", {},
    el("div", {class: "title"}, el("h1", {}, job), badge(state)),
    el("ul", {class: "lines"}, state.summary.map((line) => el("li", {}, line.trim()))),
    el("dl", {class: "tiles"},
      tile("world size", state.world_size, "ranks"),
      tile("nodes that train", training.length, state.limits ? `of ${sizes(state.limits)}` : ""),
      tile("step", steps.length ? Math.min(...steps) : "-"),
      tile("steps/s", rate(state.steps_per_second)),
      tile("generation", state.generation),
      tile("restarts used", budget(state))));
}

function cause({outcome}) {
  if (!outcome || outcome.state === "succeeded") return [];
  const failure = outcome.failure;
  if (!failure) return [];
  return [el("section", {class: "cause"}, el("h2", {}, "Root cause"),
    el("div", {}, failed(failure), el("span", {class: "quiet"},
      ` after ${lasted(failure.uptime * 1000)}${failure.at ? `, ${when(failure.at)}` : ""}`)),
    failure.message ? el("pre", {tabindex: "0"}, failure.message) : null)];
}

function nodes(state) {
  const rows = state.nodes.map((node) => el("tr", {},
    cell("name", node.node),
    el("td", {class: `short ${{training: "good", gone: "bad"}[node.state] || "warn"}`}, node.state),
    cell("n", span(node.ranks), "ranks"),
    cell("n", node.pace ? node.pace.step : "-", "step"),
    cell("n", node.pace ? rate(node.pace.per_second) : "-", "steps/s"),
    cell("short", node.pace ? node.pace.doing : "-", "doing"),
    cell("rest quiet", node.why)));
  return el("section", {}, el("h2", {}, `Nodes `, el("span", {class: "quiet"}, state.nodes.length)),
    rows.length
      ? table("wide", [["node"], ["state"], ["ranks", "n"], ["step", "n"], ["steps/s", "n"], ["doing"], ["why"]], rows)
      : el("p", {class: "quiet"}, "None is there."));
}

function events(state) {
  return el("section", {}, el("h2", {}, "Events ", el("span", {class: "quiet"}, "the newest first")),
    state.events.length
      ? el("ul", {class: "events", tabindex: "0"}, [...state.events].reverse().map((line) => el("li", {}, line)))
      : el("p", {class: "quiet"}, "None yet."));
}

function timeline(state) {
  const now = Date.now();
  const worlds = state.history.map((entry) => ({...entry, from: Date.parse(entry.began_at), to: Date.parse(entry.ended_at)}))
  const rows = [...worlds].reverse().map((world) => el("tr", {},
    cell("name n", world.generation),
    cell("short", when(world.began_at) || "-"),
    cell("n", world.to ? lasted(world.to - world.from) || "-" : world.from && !state.outcome ? "goes on" : "-", "for"),
    cell("n", world.world_size === undefined ? "-" : world.world_size, "world"),
    cell("n", world.nodes ? world.nodes.length : "-", "nodes"),
    el("td", {class: "rest"}, world.began ? `began: ${world.began}` : "", world.ended ? el("div", {}, `ended: ${world.ended}`) : null,
      (world.hangs || []).map((line) => el("div", {class: "quiet"}, `hung: ${line}`)),
      (world.failures || []).filter((failure) => failure.message).map((failure) =>
        el("details", {"data-key": `${world.generation} ${failure.node} ${failure.rank}`},
          el("summary", {}, failed(failure)), el("pre", {tabindex: "0"}, failure.message))))));
  return el("section", {}, el("h2", {}, "Generations ", el("span", {class: "quiet"}, "one world after the other")),
    bars(worlds.filter((world) => world.from), state.outcome ? 0 : now),
    rows.length
      ? table("wide", [["generation", "n"], ["began"], ["for", "n"], ["world size", "n"], ["nodes", "n"], ["why"]], rows)
      : el("p", {class: "quiet"}, "None yet."));
}

function keepOpen(part, draw) {
  const open = new Set([...part.querySelectorAll("details[open]")].map((each) => each.dataset.key));
  draw();
  for (const each of part.querySelectorAll("details")) each.open = open.has(each.dataset.key);
}

// --- drawings ---------------------------------------------------------------------------

const LEFT = 44, RIGHT = 8;
const wide = () => Math.max(260, document.getElementById("main").clientWidth - 34);

function times(from, to, width, y) {
  const far = day(from) !== day(to);
  const name = (at) => (far ? `${day(at).slice(5)} ${clock(at).slice(0, 5)}` : clock(at));
  return [svg("text", {x: LEFT, y}, name(from)),
    svg("text", {x: width - RIGHT, y, "text-anchor": "end"}, name(to))];
}

function bars(worlds, now) {
  if (!worlds.length) return null;
  const from = Math.min(...worlds.map((world) => world.from));
  const to = Math.max(now, from + 1000, ...worlds.map((world) => world.to || world.from));
  const most = Math.max(1, ...worlds.map((world) => world.world_size || 0));
  const width = wide(), x = (at) => LEFT + (width - LEFT - RIGHT) * (at - from) / (to - from);
  const boxes = worlds.map((world) => {
    const end = world.to || (now ? to : world.from), high = 6 + 34 * (world.world_size || 0) / most;
    const told = `generation ${world.generation}: ${world.world_size ?? "?"} ranks, ${lasted(end - world.from)}`;
    return svg("rect", {class: world.to ? "bar" : "bar now", x: x(world.from), y: 44 - high,
      width: Math.max(1.5, x(end) - x(world.from) - 1), height: high}, svg("title", {}, told));
  });
  return svg("svg", {viewBox: `0 0 ${width} 64`, height: 64, role: "img", "aria-label": "worlds over time, as high as they had ranks"},
    svg("text", {x: LEFT - 6, y: 12, "text-anchor": "end"}, most), svg("text", {x: LEFT - 6, y: 44, "text-anchor": "end"}, 0),
    svg("line", {class: "axis", x1: LEFT, x2: width - RIGHT, y1: 44.5, y2: 44.5}), boxes, times(from, to, width, 60));
}

// --- what comes -------------------------------------------------------------------------

function show(...sections) {
  document.getElementById("main").replaceChildren(...sections);
}

function drawAway({away}) {
  const line = document.getElementById("away");
  line.hidden = !away;
  line.textContent = away ? shown(`etcd is away since ${when(away.since)}: what is shown is as it was then. ${away.why}`) : "";
}

function live(on, text) {
  const line = document.getElementById("live");
  line.className = on ? "on" : "off";
  line.textContent = text;
}

const drawn = {jobs: drawJobs, job: drawJob, etcd: drawAway};
let stream = null, again = 0;

function follow() {
  clearTimeout(again);
  stream = new EventSource(`${root}api/${inJob ? `jobs/${encodeURIComponent(job)}/` : ""}events`);
  stream.onopen = () => live(true, "live");
  stream.onerror = () => {
    live(false, `the server does not answer since ${clock(Date.now())}`);
    leave();
    again = setTimeout(follow, AGAIN);
  };
  for (const [name, draw] of Object.entries(drawn)) {
    stream.addEventListener(name, (event) => draw(told[name] = JSON.parse(event.data)));
  }
}

function leave() {
  clearTimeout(again);
  if (stream) stream.close();
  stream = null;
}

// A page that nobody sees takes no connection, and nodes need not tell it how fast they are.
document.addEventListener("visibilitychange", () => {
  leave();
  if (document.visibilityState === "visible") follow();
});
window.addEventListener("pagehide", leave);
window.addEventListener("resize", () => {
  if (told.job) keepOpen(parts.timeline, () => parts.timeline.replaceChildren(timeline(told.job)));
});
if (inJob) document.getElementById("where").textContent = shown(job);
follow();
