// What both pages share: asking the server, and drawing what a sequence holds.
const el = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const byId = (id) => document.getElementById(id);
const mib = (bytes) => bytes < 10485760 ? (bytes / 1048576).toFixed(2) + " MiB" : (bytes / 1048576).toFixed(0) + " MiB";
const count = (n) => Number(n).toLocaleString("en");

const key = { get: () => sessionStorage.getItem("key") || "", set: (value) => sessionStorage.setItem("key", value) };
function ask(path, body, signal) {
  const headers = key.get() ? { Authorization: "Bearer " + key.get() } : {};
  if (body) headers["Content-Type"] = "application/json";
  return fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
}
async function get(path) {
  const reply = await ask(path);
  byId("key").hidden = reply.status !== 401;
  if (!reply.ok) throw new Error(reply.status === 401 ? "The server wants an API key." : "The server is not ready: " + reply.status);
  return reply.json();
}
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(event.target.elements.value.value);
  location.reload();
});

// One square is a page of 64 tokens, or several if there are many.
function drawPages(node, sequence) {
  const kinds = [["sink", sequence.sinks], ["shared", sequence.shared], ["coded", sequence.coded - sequence.shared], ["recent", sequence.recent]];
  const total = kinds.reduce((sum, [, n]) => sum + n, 0);
  const each = Math.max(1, Math.ceil(total / 600));
  node.replaceChildren(...kinds.flatMap(([kind, n]) => Array.from({ length: Math.ceil(n / each) }, () => el("i", kind))));
  node.title = each > 1 ? `a square is ${each} pages` : "a square is a page of 64 tokens";
}
function legend(node, kinds) {
  const names = { sink: "sinks, 16 bit", shared: "codes that others use too", coded: "codes", recent: "recent, 16 bit", kept: "kept for prompts to come", free: "free" };
  node.replaceChildren(...kinds.map((kind) => {
    const item = el("span");
    item.append(el("i", kind), names[kind]);
    return item;
  }));
}
