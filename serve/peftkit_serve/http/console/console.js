"use strict";

// Everything comes from this server's own routes; the key stays in this tab's memory.
const POINTS = 120;
const byId = (id) => document.getElementById(id);
let key = "";
let before = null;
const history = { throughput: [], latency: [] };
let running = [];

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path) {
  const answer = await fetch(path, { headers: headers() });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Error(body?.error?.message ?? `${path}: ${answer.status}`);
}

function say(problem) {
  byId("problem").textContent = problem;
  byId("problem").hidden = !problem;
}

function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}

function fill(body, rows) {
  body.replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => element("td", cell ?? "–")));
    return row;
  }));
}

// Sums of each metric of Prometheus' text over its labels.
function sums(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-z_:]+)(?:\{.*\})? ([^ ]+)$/i.exec(line);
    if (match) found.set(match[1], (found.get(match[1]) ?? 0) + Number(match[2]));
  }
  return found;
}

function draw(id, values) {
  const most = Math.max(...values, 1e-9);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", values.map((value, i) => `${(i * 300) / (POINTS - 1)},${78 - (76 * value) / most}`).join(" "));
  byId(id).replaceChildren(line);
}

function keep(id, value, text) {
  history[id].push(value);
  if (history[id].length > POINTS) history[id].shift();
  byId(`${id}-now`).textContent = text;
  draw(id, history[id]);
}

async function measure() {
  const now = { time: performance.now(), of: sums(await (await ask("metrics")).text()) };
  const value = (name) => now.of.get(`peftkit_${name}`) ?? 0;
  const figures = {
    running: value("requests_running"), waiting: value("requests_waiting"), "pages used": value("pages_used"),
    "adapters on the device": value("adapters_resident"), "adapters in memory": value("adapters_loaded"),
    preemptions: value("preemptions_total"), refusals: value("refusals_total"),
  };
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, number]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", String(number)));
    return pair;
  }));
  if (before) {
    const grown = (name) => value(name) - (before.of.get(`peftkit_${name}`) ?? 0);
    const rate = (1000 * grown("generation_tokens_total")) / (now.time - before.time);
    keep("throughput", rate, rate.toFixed(1));
    const count = grown("time_to_first_token_seconds_count");
    const mean = count ? (1000 * grown("time_to_first_token_seconds_sum")) / count : 0;
    keep("latency", mean, count ? `${mean.toFixed(0)} ms` : "–");
  }
  before = now;
}

async function list() {
  const [models, adapters, tenants] = await Promise.all(
    ["v1/models", "v1/adapters", "v1/tenants"].map(async (path) => (await ask(path)).json()));
  byId("base").textContent = models.data[0].id;
  const chosen = new Set([...document.querySelectorAll("#choices input:checked")].map((box) => box.value));
  const known = [...document.querySelectorAll("#choices input")].map((box) => box.value);
  const names = models.data.map((card) => card.id);
  if (known.join() !== names.join()) {
    byId("choices").replaceChildren(...names.map((name, i) => {
      const label = element("label");
      const box = element("input");
      Object.assign(box, { type: "checkbox", value: name, checked: known.length ? chosen.has(name) : i < 2 });
      label.append(box, ` ${name}`);
      return label;
    }));
  }
  const date = (seconds) => (seconds ? new Date(1000 * seconds).toLocaleTimeString() : null);
  fill(byId("adapters"), adapters.data.flatMap((adapter) => adapter.versions.map((one) => [
    adapter.name, one.version, one.method, one.rank, one.bytes, one.weight.toFixed(2), one.tier, one.references,
    one.load_ms?.toFixed(0), date(one.last_use)])));
  fill(byId("tenants"), tenants.data.map((one) => [
    one.name, one.adapters.join(", "),
    Object.entries(one.limits).filter(([, limit]) => limit !== null).map(([name, limit]) => `${name} ${limit}`).join(", "),
    one.keys.map((kept) => kept.id).join(", "), one.running, one.waiting]));
}

async function stream(model, article, controller) {
  const chat = byId("chat").checked;
  const prompt = byId("prompt").value;
  const body = {
    model, stream: true, max_tokens: Number(byId("max-tokens").value), temperature: Number(byId("temperature").value),
    ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  const text = article.querySelector("pre");
  const start = performance.now();
  const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", signal: controller.signal, body: JSON.stringify(body),
    headers: { ...headers(), "content-type": "application/json" },
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  let rest = "";
  for await (const block of answer.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + block).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      text.textContent += chunk.choices[0]?.text ?? chunk.choices[0]?.delta?.content ?? "";
    }
  }
  article.querySelector("p").textContent = `${((performance.now() - start) / 1000).toFixed(2)} s`;
}

async function play(event) {
  event.preventDefault();
  const models = [...document.querySelectorAll("#choices input:checked")].map((box) => box.value);
  say(models.length ? "" : "choose at least one model");
  running.forEach((controller) => controller.abort());
  running = models.map(() => new AbortController());
  byId("stop").disabled = !models.length;
  const articles = models.map((model) => {
    const article = element("article");
    article.append(element("h3", model), element("p", "…"), element("pre"));
    return article;
  });
  byId("answers").replaceChildren(...articles);
  const own = running;
  await Promise.all(models.map((model, i) => stream(model, articles[i], own[i]).catch((error) => {
    articles[i].querySelector("p").textContent = error.name === "AbortError" ? "stopped" : error.message;
  })));
  if (own === running) byId("stop").disabled = true;
}

async function look() {
  try {
    await Promise.all([measure(), list()]);
    say("");
  } catch (error) {
    say(error.message);
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  look();
});
byId("play-form").addEventListener("submit", play);
byId("stop").addEventListener("click", () => running.forEach((controller) => controller.abort()));
look();
setInterval(look, 1000);
