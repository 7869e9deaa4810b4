// Making and changing elements. Text goes in as text nodes and attributes only, never as HTML; the
// page's policy refuses anything else.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else attribute(node, name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// el("td", { class: "end" }, "text", child, ...): null, undefined and false are left out.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

// Each of these touches the page only where something changes, so that focus and selection stay.
export function text(node, value) {
  const wanted = String(value);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function attribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const wanted = value === true ? "" : String(value);
  if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
}

// Children of `parent` become one for each item, in order: `make(item)` for a new key, then
// `update(node, item)` for all.
export function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  const keys = items.map((item) => String(keyOf(item)));
  const stays = new Set(keys);
  for (const [key, node] of old) if (!stays.has(key)) node.remove(); // else all after it would move
  let before = parent.firstElementChild;
  items.forEach((item, index) => {
    const key = keys[index];
    let node = old.get(key);
    if (!node) {
      node = make(item);
      node.dataset.key = key;
    }
    if (node === before) before = before.nextElementSibling;
    else parent.insertBefore(node, before);
    update(node, item);
  });
}

// Children are replaced, but only when `signature` says that what they show has changed.
export function redraw(parent, signature, draw) {
  const wanted = JSON.stringify(signature);
  if (parent.drawnFrom === wanted) return;
  parent.drawnFrom = wanted;
  parent.replaceChildren(...[draw()].flat());
}
