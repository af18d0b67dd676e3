"use strict";
// Draws the page of experiments/look.py from the data that stands in it. What a model wrote becomes text nodes alone.
//
// P tokens of prompt, then the response. Its token t stands at position P + t, and the query at P + t - 1 drew it. That
// query saw the key at j if j <= P + t - 1 < gone[j], in each layer and KV head by itself.

const $ = (id) => document.getElementById(id);
const page = JSON.parse($("data").textContent);
const state = { response: null, token: 0, measure: "xi", sort: "number", up: true };

// ------------------------------------------------------------------------------------------------------ small things

function el(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children); // strings become text
  return node;
}

function short(x) {
  if (x === null || Number.isNaN(x)) return "not finite";
  if (x === 0 || Number.isInteger(x)) return String(x);
  const size = Math.abs(x);
  return size >= 1e-3 && size < 1e4 ? String(Number(x.toPrecision(3))) : x.toExponential(1).replace(".0", "");
}

// What is not seen, or turns the order of what follows, shown by its number.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
const visible = (text) => text.replace(HIDDEN, (c) => `⟨${c.charCodeAt(0).toString(16)}⟩`);
const line = (text) => visible(text.slice(0, 300)).replace(/\s+/g, " ");
const quoted = (text) => `“${visible(text).replace(/\n/g, "↵")}”`;
const plural = (n, what) => `${short(n)} ${what}${n === 1 ? "" : "s"}`;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function decode(base64, type) {
  return new type(Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer); // little-endian, as everywhere now
}

function unpack(response) {
  // The arrays of a response that was kept, decoded when it is first looked at.
  const kept = response.kept;
  if (!kept || kept.log_xi) return kept;
  for (const name of ["logp_old", "logp_sparse", "entropy", "weights"]) kept[name] = decode(kept[name], Float32Array);
  kept.log_xi = kept.logp_old.map((logp, t) => logp - kept.logp_sparse[t]);
  const rank = (x) => (Number.isNaN(x) ? -Infinity : x);
  kept.smallest = kept.log_xi.reduce((best, x, t, all) => (rank(x) < rank(all[best]) ? t : best), 0);
  if (kept.gone) kept.gone = decode(kept.gone, kept.bytes === 2 ? Int16Array : Int32Array); // (L, K, T) as one row
  return kept;
}

function firsts() {
  // The first entries, in `gone`, of the layers and KV heads that are chosen.
  const { layers, heads } = page.cache;
  const range = (chosen, n) => (chosen === "all" ? [...Array(n).keys()] : [Number(chosen)]);
  const T = state.response.kept.pieces.length;
  return range($("layer").value, layers).flatMap((l) => range($("head").value, heads).map((k) => (l * heads + k) * T));
}

function shares(kept, query) {
  // For each position up to the query's, the share of the chosen heads in which the query saw its key.
  const chosen = firsts();
  return Array.from({ length: query + 1 }, (_, j) => {
    return chosen.reduce((n, first) => n + (kept.gone[first + j] > query), 0) / chosen.length;
  });
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

// ------------------------------------------------------------------------------------------------------- run and step

function drawHead() {
  $("title").textContent = page.title;
  $("about").textContent = page.about;
  $("notes").append(...page.notes.map((note) => el("p", {}, note)));
  $("settings").hidden = !Object.keys(page.settings).length;
  for (const [name, value] of Object.entries(page.settings)) {
    $("settings").lastElementChild.append(el("div", {}, el("dt", {}, `${name} `), el("dd", {}, value)));
  }
  for (const curve of page.curves) $("curves").append(drawCurve(curve));
}

function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function drawCurve({ title, points }) {
  if (!points.length) return el("figure", {}, el("figcaption", {}, `${title}: none`));
  const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (step) => 40 + (right > left ? (210 * (step - left)) / (right - left) : 105);
  const y = (value) => (high > low ? 80 - (70 * (value - low)) / (high - low) : 45);
  const label = (text, x, y, anchor) => svg("text", { x, y, "text-anchor": anchor }, text);
  const dots = points.map(([step, value]) => {
    const name = svg("title", {}, `step ${step}: ${short(value)}`);
    return svg("circle", { cx: x(step), cy: y(value), r: points.length > 40 ? 1.2 : 2.5, fill: "var(--accent)" }, name);
  });
  const path = points.map(([step, value]) => `${x(step)},${y(value)}`).join(" ");
  const picture = svg(
    "svg", { viewBox: "0 0 256 98", role: "img", "aria-label": title },
    svg("path", { d: "M40 5V85H252", fill: "none", stroke: "var(--line)" }),
    svg("path", { d: `M${x(page.step)} 5V85`, stroke: "var(--soft)", "stroke-dasharray": "2 2" }),
    svg("polyline", { points: path, fill: "none", stroke: "var(--accent)", "stroke-width": 1.5 }),
    ...dots,
    ...[...new Set([low, high])].map((value) => label(short(value), 36, y(value) + 3, "end")),
    ...[...new Set([left, right])].map((step) => label(step, x(step), 96, "middle")),
  );
  return el("figure", {}, el("figcaption", {}, title), picture);
}

const COLUMNS = [ // property, title, text
  ["number", "response", (r) => r.number],
  ["group", "group", (r) => r.group],
  ["reward", "reward", (r) => short(r.reward)],
  ["advantage", "advantage", (r) => short(r.advantage)],
  ["xi_min", "smallest xi", (r) => short(r.xi_min)],
  ["accepted", "accepted", (r) => (r.accepted ? "yes" : "no")],
  ["tokens", "length", (r) => r.tokens + (r.finished ? "" : " (cut)")],
  ["has", "kept", (r) => ["", "tokens", "evictions"][r.has]],
  ["response", "text", (r) => line(r.response)],
];

function drawTable() {
  const [head, body] = $("responses").children;
  head.replaceChildren(el("tr", {}, ...COLUMNS.map(([name, title]) => {
    const arrow = name === state.sort ? (state.up ? " ▲" : " ▼") : "";
    const th = el("th", {}, el("button", { onclick: () => sortBy(name) }, title + arrow));
    th.dataset.column = name;
    if (arrow) th.ariaSort = state.up ? "ascending" : "descending";
    return th;
  })));
  const rank = (r) => r[state.sort] ?? -Infinity; // what is not finite comes first
  const order = (a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : a.number - b.number);
  const sorted = [...page.responses].sort((a, b) => (state.up ? order(a, b) : order(b, a)));
  const grouped = ["number", "group"].includes(state.sort);
  body.replaceChildren(...sorted.flatMap((r, i) => {
    const first = grouped && r.group !== sorted[i - 1]?.group;
    return first ? [groupRow(page.groups[r.group], r.group), responseRow(r)] : [responseRow(r)];
  }));
}

function groupRow(group, number) {
  const text = `group ${number}, answer ${line(group.answer)}: ${line(group.prompt)}`;
  return el("tr", { className: "group" }, el("td", { colSpan: COLUMNS.length, title: visible(group.prompt) }, text));
}

function responseRow(r) {
  const row = el("tr", { className: "response", tabIndex: 0, onclick: () => choose(r) });
  row.onkeydown = (event) => event.key === "Enter" && choose(r);
  row.dataset.number = r.number;
  row.classList.toggle("chosen", r === state.response);
  row.append(...COLUMNS.map(([name, , text]) => {
    return el("td", { className: name === "accepted" && !r.accepted ? "no" : "" }, String(text(r)));
  }));
  return row;
}

function sortBy(name) {
  state.up = state.sort === name ? !state.up : name !== "reward" && name !== "has";
  state.sort = name;
  drawTable();
  document.querySelector(".scroll").scrollTop = 0;
}

// ------------------------------------------------------------------------------------------------------- one response

const MEASURES = { // strength of the colour from 0 to 1, and the ends of its scale
  xi: {
    title: "log xi", from: "dense gives it less: xi = epsilon", to: "more: 1 / epsilon",
    color: (kept, t) => (kept.log_xi[t] > 0 ? "higher" : "lower"),
    strength: (kept, t) => Math.sqrt(Math.abs(kept.log_xi[t]) / -Math.log(page.epsilon)), // roots show small ones
  },
  logp: {
    title: "dense log-prob", from: "0", to: "-10 nats",
    color: () => "likely", strength: (kept, t) => -kept.logp_old[t] / 10,
  },
  entropy: {
    title: "entropy", from: "0", to: "4 nats",
    color: () => "spread", strength: (kept, t) => kept.entropy[t] / 4,
  },
};

function choose(response) {
  state.response = response;
  for (const row of $("responses").querySelectorAll("tr.response")) {
    row.classList.toggle("chosen", Number(row.dataset.number) === response.number);
  }
  const kept = unpack(response);
  state.token = kept ? kept.smallest : 0;
  location.replace(`#${response.number}`); // so that a reload, or a link, shows it again
  const outcome = response.accepted ? "accepted" : "rejected";
  $("response").firstElementChild.textContent = `Response ${response.number}: reward ${short(response.reward)}, ${outcome}`;
  const verdict = $("response").querySelector(".verdict");
  verdict.className = `verdict ${outcome}`;
  verdict.replaceChildren(...why(response).map((sentence) => el("p", {}, sentence)));
  $("measures").hidden = !kept;
  $("cache").hidden = !kept?.gone;
  drawTokens();
  drawCache();
}

function why(r) {
  // Why a response was rejected or not, as paragraphs.
  const below = r.xi_min === null || r.xi_min < page.epsilon;
  const spared = below && r.accepted ? ` Nothing is rejected with --correction ${page.correction}.` : "";
  const sentences = [
    "A response is rejected if some token's xi = p(dense) / p(sampler) is below " +
      `epsilon = ${short(page.epsilon)}; the smallest here is ${short(r.xi_min)}.${spared}`,
  ];
  const kept = r.kept;
  if (!kept) return [...sentences, "Its tokens were not kept: train with --record-samples n to see which token that was."];
  const [t, q] = [kept.smallest, kept.prompt + kept.smallest - 1];
  const [old, sparse] = [Math.exp(kept.logp_old[t]), Math.exp(kept.logp_sparse[t])];
  let where = `It is token ${t}, ${quoted(kept.pieces[q + 1])}: the sampler gave it probability ${short(sparse)}, `;
  where += `the dense policy ${short(old)}.`;
  const others = kept.log_xi.filter((x, i) => i !== t && x < Math.log(page.epsilon)).length;
  if (others) where += ` ${plural(others, "other token")} fell below epsilon, too.`;
  if (!kept.gone) return [...sentences, where, "When its keys were evicted is not in this page: see --evictions."];
  const { layers, heads } = page.cache;
  const per = Array.from({ length: layers * heads }, (_, h) => evictedBefore(kept, h, q));
  const lost = Math.min(...per) === Math.max(...per) ? `${per[0]}` : `${Math.min(...per)} to ${Math.max(...per)}`;
  const each = `each of the ${layers * heads} heads (${layers} layers of ${heads})`;
  return [...sentences, where, `It was drawn after ${q + 1} tokens, of which ${each} had lost ${lost}.`];
}

function evictedBefore(kept, head, query) {
  const T = kept.pieces.length;
  return kept.gone.subarray(head * T, head * T + query + 1).filter((gone) => gone <= query).length;
}

function drawTokens() {
  const [r, kept] = [state.response, state.response.kept];
  if (!kept) {
    const prompt = el("span", { className: "asked" }, visible(page.groups[r.group].prompt));
    $("tokens").replaceChildren(prompt, visible(r.response));
    return;
  }
  const measure = MEASURES[state.measure];
  $("tokens").replaceChildren(...kept.pieces.map((piece, position) => {
    const t = position - kept.prompt;
    const node = token(piece);
    if (t < 0) return Object.assign(node, { className: "asked" });
    node.dataset.token = t;
    const strength = Math.min(1, Math.max(0, measure.strength(kept, t) || 0));
    node.style.background = `rgb(var(--${measure.color(kept, t)}) / ${(0.75 * strength).toFixed(3)})`;
    node.classList.toggle("smallest", t === kept.smallest);
    node.classList.toggle("chosen", t === state.token);
    return node;
  }));
  drawScale(measure);
}

const token = (piece) => el("span", {}, visible(piece).replace(/\n/g, "↵\n") || "▯"); // "": a part of a character

function drawScale(measure) {
  const ends = state.measure === "xi" ? ["lower", "higher"] : ["", measure.color()];
  const stops = ends.flatMap((name, side) => {
    // as the tokens: roots of the distance from 1 where xi is shown
    const strengths = name ? [0, 0.25, 0.5, 0.75, 1].map((s) => (state.measure === "xi" ? Math.sqrt(s) : s)) : [];
    return (side ? strengths : strengths.reverse()).map((s) => `rgb(var(--${name}) / ${0.75 * s})`);
  });
  const ramp = el("span", { className: "ramp" });
  ramp.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  const select = el("select", { id: "measure", onchange: (event) => ((state.measure = event.target.value), drawTokens()) });
  for (const [name, { title }] of Object.entries(MEASURES)) {
    select.append(el("option", { value: name, selected: name === state.measure }, title));
  }
  const smallest = el("span", { className: "soft" }, "framed red: the smallest xi; click a token, then ← and →");
  $("measures").replaceChildren(el("label", {}, "colour ", select), measure.from, ramp, measure.to, smallest);
}

function pick(t) {
  const kept = state.response.kept;
  state.token = Math.min(Math.max(t, 0), kept.pieces.length - kept.prompt - 1);
  for (const node of $("tokens").children) node.classList.toggle("chosen", Number(node.dataset.token) === state.token);
  if (kept.gone) drawSeen();
}

function facts(t) {
  // What is known of a token, for the tip: pairs of name and value.
  const kept = state.response.kept;
  const at = kept.prompt + t;
  const logp = (x) => `${x.toFixed(3)} (p ${short(Math.exp(x))})`;
  return [
    ["token", `${t}, ${quoted(kept.pieces[at])}, position ${at}`],
    ["sampler's log-prob", logp(kept.logp_sparse[t])],
    ["dense log-prob", logp(kept.logp_old[t])],
    ["xi", short(Math.exp(kept.log_xi[t]))],
    ["weight as used", short(kept.weights[t])],
    ["entropy", `${kept.entropy[t].toFixed(3)} nats`],
    ...(kept.gone ? [["keys held", `${short(sum(shares(kept, at - 1)))} of ${at}${chosenHeads()}`]] : []),
  ];
}

function tip(event, rows) {
  $("tip").hidden = !rows;
  if (!rows) return;
  const cells = rows.map(([name, value]) => el("tr", {}, el("td", { className: "soft" }, name), el("td", {}, value)));
  $("tip").replaceChildren(el("table", {}, ...cells));
  const { offsetWidth: width, offsetHeight: height } = $("tip");
  $("tip").style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  $("tip").style.top = `${event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
}

// ---------------------------------------------------------------------------------------------------------- the cache

function chosenHeads() {
  const [l, k] = [$("layer").value, $("head").value];
  if (l === "all") return k === "all" ? ", mean of all heads" : `, head ${k}, mean of all layers`;
  return k === "all" ? `, layer ${l}, mean of its heads` : `, layer ${l}, head ${k}`;
}

function drawCache() {
  const kept = state.response.kept;
  if (!kept?.gone) return;
  const T = kept.pieces.length;
  $("shades").hidden = firsts().length === 1;
  $("last").textContent = `${T - 1}`;
  document.querySelector(".born").style.left = `${(100 * kept.prompt) / T}%`;
  paint(document.querySelector(".map canvas"), kept);
  drawSeen();
}

function paint(canvas, kept) {
  // A column a key, a row a query, from top to bottom: what each query saw. At most 1,000 of either, then in bins.
  const [chosen, T] = [firsts(), kept.pieces.length];
  const n = Math.min(T, 1000);
  const bin = (x) => Math.floor((x * n) / T);
  const held = new Int32Array((n + 1) * n); // first how many keys more or less each row has than the one above
  const keys = new Int32Array(n);
  for (let j = 0; j < T; j++) {
    keys[bin(j)] += chosen.length;
    for (const first of chosen) {
      held[bin(j) * n + bin(j)]++;
      held[bin(Math.min(kept.gone[first + j], T)) * n + bin(j)]--;
    }
  }
  canvas.width = canvas.height = n;
  const context = canvas.getContext("2d");
  const image = context.createImageData(n, n);
  const [asked, answered, grey] = [color("prompt"), color("key"), "128 128 128"].map((rgb) => rgb.split(" ").map(Number));
  for (let row = 0; row < n; row++) {
    for (let column = 0; column <= row; column++) {
      const at = row * n + column;
      if (row) held[at] += held[at - n];
      const rgb = held[at] ? (column < bin(kept.prompt) ? asked : answered) : grey;
      for (let i = 0; i < 3; i++) image.data[4 * at + i] = rgb[i];
      image.data[4 * at + 3] = held[at] ? 50 + (205 * held[at]) / keys[column] : 46;
    }
  }
  context.putImageData(image, 0, 0);
}

function drawSeen() {
  const kept = state.response.kept;
  const query = kept.prompt + state.token - 1;
  const seen = shares(kept, query);
  const gone = seen.map((share, j) => (share ? -1 : j)).filter((j) => j >= 0);
  const asked = gone.filter((j) => j < kept.prompt).length;
  document.querySelector(".row").style.top = `${(100 * (query + 0.5)) / kept.pieces.length}%`;
  const everywhere = firsts().length > 1 ? " in every one" : "";
  $("seen").textContent =
    `When token ${state.token}, ${quoted(kept.pieces[query + 1])}, was drawn, the query at position ${query} saw ` +
    `${plural(sum(seen), "key")} of ${query + 1}${chosenHeads()}. Struck through: the ${gone.length} that were gone` +
    `${everywhere}, ${asked} of them of the prompt.`;
  $("context").replaceChildren(...seen.map((share, j) => {
    const node = token(kept.pieces[j]);
    node.className = `${share ? "seen" : "gone"}${j < kept.prompt ? " asked" : ""}`;
    node.style.setProperty("--share", share);
    node.dataset.position = j;
    return node;
  }));
}

function life(j) {
  // When a key went, for the tip.
  const kept = state.response.kept;
  const times = firsts().map((first) => kept.gone[first + j]).filter((gone) => gone < kept.pieces.length);
  const held = firsts().length - times.length;
  const when = times.length ? `after ${[...new Set([Math.min(...times), Math.max(...times)])].join(" to ")} tokens` : "never";
  const where = j < kept.prompt ? "prompt" : `response, token ${j - kept.prompt}`;
  return [
    ["key", `${quoted(kept.pieces[j])}, position ${j} (${where})`],
    ["evicted", when],
    ...(firsts().length > 1 ? [["held to the end", `by ${held} of ${firsts().length} heads`]] : []),
  ];
}

// --------------------------------------------------------------------------------------------------------- what is done

function listen() {
  const of = (event, name) => event.target.dataset?.[name];
  $("tokens").onclick = (event) => of(event, "token") && pick(Number(of(event, "token")));
  $("tokens").onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && state.response.kept) event.preventDefault(), pick(state.token + step);
  };
  $("tokens").onmousemove = (event) => tip(event, of(event, "token") && facts(Number(of(event, "token"))));
  $("context").onmousemove = (event) => tip(event, of(event, "position") && life(Number(of(event, "position"))));
  const map = document.querySelector(".map");
  const place = (event) => {
    const [box, T] = [map.querySelector("canvas").getBoundingClientRect(), state.response.kept.pieces.length];
    const at = (offset, size) => Math.min(T - 1, Math.max(0, Math.floor((offset * T) / size)));
    return { key: at(event.clientX - box.left, box.width), query: at(event.clientY - box.top, box.height) };
  };
  map.onmousemove = (event) => tip(event, [...life(place(event).key), ["under the pointer", `query ${place(event).query}`]]);
  map.onclick = (event) => pick(place(event).query + 1 - state.response.kept.prompt);
  for (const node of [$("tokens"), $("context"), map]) node.onmouseleave = () => tip(null, null);
  for (const [name, count] of [["layer", page.cache?.layers], ["head", page.cache?.heads]]) {
    $(name).append(...["all", ...Array(count ?? 0).keys()].map((i) => el("option", { value: i }, String(i))));
    $(name).onchange = drawCache;
  }
  matchMedia("(prefers-color-scheme: dark)").onchange = drawCache;
}

drawHead();
listen();
$("step").textContent = page.step ? `Responses of step ${page.step}` : "Responses";
drawTable();
const named = page.responses.find((r) => location.hash === `#${r.number}`);
const first = (a, b) => b.has - a.has || a.xi_min - b.xi_min; // of which most is known; null counts as 0
choose(named ?? [...page.responses].sort(first)[0]);
const row = $("responses").querySelector("tr.response.chosen");
document.querySelector(".scroll").scrollTop = row.offsetTop - 150;
