// A grid of cells with a label left and right of each row, as memory map and heat need it. What a
// cell means is said in a line below, for the pointer and for the arrow keys. Neighbours that look
// alike are one element: a large model has 100,000s of slots, in few runs.

import { attribute, el, keyed, svg, text } from "./dom.js";

const COLUMN = 10;
const ROW = 10;

const columnsOf = (row) => row.runs.reduce((sum, run) => sum + run.count, 0);

export class CellGrid {
  // host: an empty element. name: what a screen reader calls it.
  constructor(host, name) {
    this.name = name;
    this.left = el("div", { class: "labels" });
    this.right = el("div", { class: "labels far" });
    this.picture = svg("svg", { class: "cells", preserveAspectRatio: "none", tabindex: "0", role: "img" });
    this.cursor = svg("rect", { class: "cursor", width: COLUMN, height: ROW, visibility: "hidden" });
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.hint = "";
    this.rows = [];
    this.columns = 0;
    this.shape = "";
    this.at = null;
    host.append(el("div", { class: "grid" }, this.left, this.picture, this.right), this.readout);
    this.listen();
  }

  // rows: [{ key, left, right, runs: [{ count, fill, opacity?, kind? }], words(column) }]; the counts
  // of each row's runs add up to the same number of columns.
  show(rows, hint) {
    this.rows = rows;
    this.hint = hint;
    this.columns = rows.length ? Math.max(...rows.map(columnsOf)) : 0;
    this.labels(this.left, "left");
    this.labels(this.right, "right");
    attribute(this.picture, "aria-label", `${this.name}: ${hint}`);
    this.resize();
    rows.forEach((row, r) => this.draw(row, r));
    this.say();
  }

  labels(host, side) {
    keyed(
      host,
      this.rows,
      (row) => row.key,
      () => el("span"),
      (node, row) => text(node, row[side]),
    );
  }

  resize() {
    const shape = this.rows.map(columnsOf).join();
    if (shape === this.shape) return;
    this.shape = shape;
    attribute(this.picture, "viewBox", `0 0 ${Math.max(1, this.columns) * COLUMN} ${Math.max(1, this.rows.length) * ROW}`);
    this.picture.dataset.rows = this.rows.length;
    this.lines = this.rows.map((_, r) => svg("g", { transform: `translate(0 ${r * ROW})` }));
    this.picture.replaceChildren(...this.lines, this.cursor);
    const height = this.rows.length > 12 ? 14 : 20;
    this.picture.style.blockSize = `${this.rows.length * height}px`;
    for (const labels of [this.left, this.right]) labels.style.gridAutoRows = `${height}px`;
    this.move(null);
  }

  // One rect for each run of a row.
  draw({ runs }, r) {
    const line = this.lines[r];
    while (line.childElementCount > runs.length) line.lastElementChild.remove();
    while (line.childElementCount < runs.length) line.append(svg("rect", { y: 0.5, height: ROW - 1 }));
    let column = 0;
    runs.forEach((run, index) => {
      const node = line.children[index];
      attribute(node, "x", column * COLUMN + 0.5);
      attribute(node, "width", run.count * COLUMN - 1);
      this.paint(node, run);
      column += run.count;
    });
  }

  paint(node, run) {
    attribute(node, "class", run.kind ? `cell ${run.kind}` : "cell");
    if (node.style.fill !== run.fill) node.style.fill = run.fill ?? "";
    attribute(node, "fill-opacity", run.opacity === undefined ? null : run.opacity.toFixed(3));
  }

  listen() {
    const { picture } = this;
    picture.addEventListener("pointermove", (event) => this.move(this.under(event)));
    picture.addEventListener("pointerleave", () => this.move(null));
    picture.addEventListener("focus", () => this.at ?? this.move([0, 0]));
    picture.addEventListener("blur", () => this.move(null));
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    picture.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      const [row, column] = this.at ?? [0, 0];
      this.move([row + step[0], column + step[1]]);
    });
  }

  under(event) {
    const box = this.picture.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.rows.length);
    return [row, Math.floor(((event.clientX - box.left) / box.width) * this.columns)];
  }

  move(at) {
    if (at && this.rows.length) {
      const row = Math.min(Math.max(0, at[0]), this.rows.length - 1);
      this.at = [row, Math.min(Math.max(0, at[1]), columnsOf(this.rows[row]) - 1)];
      attribute(this.cursor, "x", this.at[1] * COLUMN);
      attribute(this.cursor, "y", row * ROW);
    } else {
      this.at = null;
    }
    attribute(this.cursor, "visibility", this.at ? "visible" : "hidden");
    this.say();
  }

  say() {
    const row = this.at && this.rows[this.at[0]];
    text(this.readout, row ? row.words(this.at[1]) : this.hint);
  }
}
