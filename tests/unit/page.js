// Runs the script of a page over the answers in a JSON file, with as much of a DOM as it uses; prints what it shows.
"use strict";
const fs = require("fs");
const [page, answers] = process.argv.slice(2).map(p => fs.readFileSync(p, "utf8"));
const script = page.match(/<script>([\s\S]*)<\/script>/)[1];

class Element {
  constructor(tag) { this.tag = tag; this.children = []; this.style = {}; this.textContent = null; this.hidden = true }
  append(...c) { this.children.push(...c) }
  replaceChildren(...c) { this.children = c }
  setAttribute(name, value) { if (/NaN|undefined/.test(value)) throw new Error(`${name} = ${value}`) }
  add(tag) { const e = new Element(tag); this.append(e); return e }
  createTHead() { return this.add("thead") }
  createTBody() { return this.add("tbody") }
  insertRow() { return this.add("tr") }
  addEventListener() {}
  get text() { return [this.textContent ?? "", ...this.children.map(c => c.text ?? String(c))].join(" ").trim() }
}
const byId = Object.fromEntries([...page.matchAll(/id="(\w+)"/g)].map(m => [m[1], new Element("div")]));
const main = new Element("main");
Object.assign(globalThis, {
  document: { getElementById: id => byId[id], createElement: t => new Element(t), createElementNS: (_, t) => new Element(t),
    querySelector: () => main },
  location: { hash: "" }, sessionStorage: { getItem: () => null }, setInterval: () => {},
  fetch: async path => ({ ok: true, status: 200, json: async () => JSON.parse(answers)[path] }),
});
(0, eval)(script);
setTimeout(() => console.log(JSON.stringify({ hidden: main.hidden,
  ...Object.fromEntries(Object.entries(byId).map(([id, e]) => [id, e.text])) })), 50);
