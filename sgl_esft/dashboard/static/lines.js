// A line chart of up to ten minutes: an SVG without words, its words beside it in HTML.

import { attribute, el, svg, text } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 100;
const SPANS_S = [60, 120, 300, 600]; // the shortest that holds all points

// 1, 2 or 5 times a power of ten, not below `value`.
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value * 0.999);
}

function pathOf(points, now, span, most) {
  const parts = [];
  let pen = "M";
  for (const [time, value] of points) {
    if (value === null || value === undefined) {
      pen = "M";
      continue;
    }
    const x = WIDTH * (1 - (now - time) / span);
    const y = HEIGHT * (1 - value / most);
    parts.push(`${pen}${x.toFixed(1)} ${y.toFixed(1)}${pen === "M" ? "h.01" : ""}`);
    pen = "L";
  }
  return parts.join("");
}

export class LineChart {
  // series: [{ name, colour (a class) }]; print: number -> text
  constructor(host, title, series, print) {
    this.print = print;
    this.top = el("span", { class: "axis" }, "");
    this.series = series.map(({ name, colour }) => ({
      path: svg("path", { class: `line ${colour}` }),
      now: el("b", { class: "now" }, ""),
      name,
      colour,
    }));
    const legend = this.series.map((each) =>
      el("span", { class: "entry" }, el("i", { class: `swatch ${each.colour}` }), each.name, " ", each.now),
    );
    const rules = [0, 0.5, 1].map((share) =>
      svg("path", { class: "rule", d: `M0 ${HEIGHT * share}H${WIDTH}` }),
    );
    this.picture = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title },
      rules,
      this.series.map((each) => each.path),
    );
    this.since = el("span");
    const axis = el("div", { class: "times" }, this.since, el("span", {}, "now"));
    host.append(
      el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title), el("div", { class: "legend" }, legend)),
        el("div", { class: "plot" }, this.top, this.picture), axis),
    );
  }

  // lines: for each series its points [[time in s, value|null], ...]; now: s
  show(lines, now) {
    const values = lines.flat().map(([, value]) => value).filter((value) => value > 0);
    const most = values.length ? niceCeiling(Math.max(...values)) : 1;
    const first = Math.min(now, ...lines.flat().map(([time]) => time));
    const span = SPANS_S.find((each) => each >= now - first) ?? SPANS_S.at(-1);
    text(this.top, values.length ? this.print(most) : "");
    text(this.since, `${span / 60} min ago`);
    this.series.forEach((each, index) => {
      attribute(each.path, "d", pathOf(lines[index], now, span, most));
      text(each.now, this.print(lines[index].at(-1)?.[1] ?? null));
    });
  }
}
