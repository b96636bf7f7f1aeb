'use strict';
(async () => {
// ---- data

const $ = id => document.getElementById(id);
const SVG = 'http://www.w3.org/2000/svg';  // a name space, which nothing fetches

async function load() {
  const packed = Uint8Array.from(atob($('data').textContent.trim()), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate'));
  return JSON.parse(await new Response(stream).text());
}

let doc;
try {
  if (typeof DecompressionStream === 'undefined') throw new Error('this browser cannot unpack the data; use one of 2023 or later');
  doc = await load();
} catch (error) {
  $('notes').append(el('p', {class: 'bad'}, `The interactive part is not shown: ${error.message}`));
  return;
}
const layers = doc.layers, sites = doc.sites;
const siteAt = new Map(sites.map(site => [site.name, site]));
const readers = layers.map(() => []);
layers.forEach((layer, i) => { layer.index = i; layer.inputs.forEach(j => readers[j].push(i)); });

// ---- small helpers

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value === true ? '' : value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}
function svg(tag, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}
const isNumber = value => typeof value === 'number' && Number.isFinite(value);
const db = value => isNumber(value) ? (value >= 200 ? 'exact' : value.toFixed(1) + ' dB') : '';
const percent = value => isNumber(value) ? (100 * value).toPrecision(3) * 1 + ' %' : '';
const short = value => isNumber(value) ? String(+value.toPrecision(4)) : value === null || value === undefined ? '' : String(value);
const count = value => {
  if (!isNumber(value) || !value) return '';
  const unit = value >= 1e9 ? [1e9, ' G'] : value >= 1e6 ? [1e6, ' M'] : value >= 1e3 ? [1e3, ' k'] : [1, ''];
  return +(value / unit[0]).toPrecision(3) + unit[1];
};
const bytes = value => value >= 1e6 ? (value / 1e6).toFixed(2) + ' MB' : (value / 1e3).toFixed(1) + ' kB';
const costOf = noise => isNumber(noise) && noise > 0 ? -10 * Math.log10(noise) : null;

function plainTable(head, rows, limit = 300) {
  const body = el('tbody'), table = el('table', {}, el('thead', {}, el('tr', {}, ...head.map(text => el('th', {scope: 'col'}, text)))), body);
  const box = el('div', {}, el('div', {class: 'wide'}, table));
  const add = from => {
    for (const row of rows.slice(from, from + limit))
      body.append(el('tr', {}, ...row.map(cell => cell instanceof Node ? el('td', {}, cell) : el('td', {class: isNumber(cell) ? 'num' : false}, short(cell)))));
    if (from + limit < rows.length)
      box.append(el('button', {type: 'button', onclick: event => { event.target.remove(); add(from + limit); }}, `Show more (${rows.length - from - limit} left)`));
  };
  add(0);
  return box;
}

// ---- what a layer is, and its colours

for (const layer of layers) {
  layer.rows = (layer.sites || []).map(name => siteAt.get(name)).filter(Boolean);
  const on = layer.rows.filter(site => site.enabled && isNumber(site.bits));
  layer.bits = on.length ? Math.min(...on.map(site => site.bits)) : null;
  layer.cost_db = costOf(layer.noise);
}
const any = key => layers.some(layer => isNumber(layer[key]));
const STOPS = [[44, 123, 182], [171, 217, 233], [255, 255, 191], [253, 174, 97], [215, 25, 28]];  // RdYlBu, readable by the colour-blind
const GREY = 'rgb(150,158,166)';
function ramp(share) {
  const x = Math.max(0, Math.min(1, share)) * (STOPS.length - 1), i = Math.min(STOPS.length - 2, Math.floor(x));
  return `rgb(${STOPS[i].map((from, c) => Math.round(from + (STOPS[i + 1][c] - from) * (x - i))).join(',')})`;
}
const MODES = [
  {key: 'cost_db', label: 'Sensitivity (cost at the outputs)', text: db, bad: 'low'},
  {key: 'made_db', label: 'Error made here', text: db, bad: 'low'},
  {key: 'arrived_db', label: 'Error arrived', text: db, bad: 'low'},
  {key: 'after_db', label: 'Error after', text: db, bad: 'low'},
  {key: 'jump', label: 'dB lost here', text: db, bad: 'high'},
  {key: 'bits', label: 'Width (bits)', text: short, bad: 'low'},
  {key: 'multiplications', label: 'Cost (multiplications)', text: count, bad: 'high', log: true},
].filter(mode => any(mode.key));
let mode = MODES[0] || {key: 'bits', label: 'Width (bits)', text: short, bad: 'low'};
function scaleOf(mode) {
  const f = value => mode.log ? Math.log10(value + 1) : value;
  const values = layers.map(layer => layer[mode.key]).filter(isNumber).map(f).sort((a, b) => a - b);
  if (!values.length) return {share: () => null, low: null, high: null};
  const low = values[Math.floor(0.02 * (values.length - 1))], high = values[Math.ceil(0.98 * (values.length - 1))];
  const share = value => {
    if (!isNumber(value)) return null;
    const at = high > low ? (f(value) - low) / (high - low) : 0;
    return Math.max(0, Math.min(1, mode.bad === 'low' && high > low ? 1 - at : at));
  };
  const back = value => mode.log ? 10 ** value - 1 : value;
  return {share, low: back(low), high: back(high)};
}
let scale = scaleOf(mode);
const inkOn = value => { const share = scale.share(value); return share !== null && (share > 0.9 || share < 0.1) ? '#fff' : '#10151a'; };
const colourOf = value => { const share = scale.share(value); return share === null ? GREY : ramp(share); };

// ---- head: tiles, notes, sections

function tiles() {
  const box = $('tiles'), metric = doc.metric, model = doc.model || {};
  const tile = (name, value, ...more) => box.append(el('div', {class: 'tile'}, el('small', {}, name), el('b', {}, value), ...more.filter(Boolean).map(text => el('small', {}, text))));
  if (metric) {
    const d = metric.difference || {};
    tile(`${metric.name}: float → quantized`, `${short(metric.float)} → ${short(metric.quantized)}`, isNumber(d.low) ? `difference ${short(d.estimate)}, ${percent(d.confidence)} interval ${short(d.low)} to ${short(d.high)}${d.n ? `, n = ${d.n}` : ''}` : '', d.text);
  }
  if (doc.output && isNumber(doc.output.sqnr_db)) tile(`Outputs${doc.output.name ? `, worst: ${doc.output.name}` : ''}`, db(doc.output.sqnr_db), doc.output.level, 'signal to quantization noise', isNumber(doc.output.kl) ? `KL divergence ${short(doc.output.kl)}` : '');
  if (model.bytes_float && model.bytes_quantized) tile('Parameters', `${bytes(model.bytes_float)} → ${bytes(model.bytes_quantized)}`, `${count(model.parameters)} numbers, ${(model.bytes_float / model.bytes_quantized).toFixed(2)} times smaller`);
  if (doc.size) tile('File', `${bytes(doc.size.float)} → ${bytes(doc.size.quantized)}`, `${(doc.size.float / doc.size.quantized).toFixed(2)} times smaller`);
  const on = sites.filter(site => site.enabled).length;
  if (sites.length) tile('Quantizer sites', `${on} of ${sites.length}`, `${sites.length - on} in float`, widths());
  if (doc.data && doc.data.samples) tile('Measured on', `${doc.data.samples} samples`, doc.mode ? `mode ${doc.mode}` : '', isNumber(doc.data.passes) ? `work of ${short(doc.data.passes)} passes` : '');
  if (doc.verification) tile('Runtime', doc.verification.ok ? 'agrees' : 'differs', `${(doc.verification.rows || []).length} places compared`);
}
function widths() {
  const found = new Map();
  for (const site of sites) if (site.enabled) found.set(site.dtype || `${site.bits} bits`, (found.get(site.dtype || `${site.bits} bits`) || 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, n]) => `${n} ${name}`).join(', ');
}
function section(id, title, ...content) {
  const body = content.filter(Boolean);
  if (body.length) $('rest').append(el('section', {id}, el('h2', {}, title), ...body));
}
/** A part that is made when it is opened. */
function lazily(title, make) {
  const box = el('details', {}, el('summary', {}, title));
  box.addEventListener('toggle', () => { if (box.open && box.children.length === 1) box.append(make()); });
  return box;
}

// ---- graph: modules, folding, layout

const root = {path: '', label: '', children: new Map(), members: [], parent: null, open: true, leaf: null};
for (const layer of layers) {
  const mark = layer.name.includes('/') ? '/' : '.';
  const parts = layer.name.split(mark).filter(Boolean);
  let here = root;
  root.members.push(layer.index);
  parts.slice(0, -1).forEach((part, depth) => {
    if (!here.children.has(part)) here.children.set(part, {path: here.path ? here.path + mark + part : part, label: parts.slice(Math.max(0, depth - 1), depth + 1).join(mark), children: new Map(), members: [], parent: here, open: false, leaf: null});
    here = here.children.get(part);
    here.members.push(layer.index);
  });
  here.children.set('\u0000' + layer.index, {path: layer.name, label: parts.slice(-2).join(mark) || layer.name, children: null, members: [layer.index], parent: here, open: false, leaf: layer});
  layer.node = here.children.get('\u0000' + layer.index);
}
const groups = [];  // parents before their children
for (const stack = [root]; stack.length;) {
  const group = stack.pop();
  groups.push(group);
  for (const child of group.children.values()) if (child.children) stack.push(child);
}
const single = group => group.children.size === 1;  // nothing is told by folding one thing into another
let base = root;  // what holds everything is never folded
while (single(base) && [...base.children.values()][0].children) base = [...base.children.values()][0];
const foldAll = () => { for (const group of groups) group.open = group === base || single(group); };
foldAll();
function openFirst(room = 70) {
  let shown = visible().length;
  const queue = groups.filter(group => !group.open).sort((a, b) => b.members.length - a.members.length);
  for (const group of queue) {
    if (!shownNow(group)) continue;
    if (shown + group.children.size - 1 > room) continue;
    group.open = true;
    shown += group.children.size - 1;
  }
}
function shownNow(node) {
  for (let up = node.parent; up; up = up.parent) if (!up.open) return false;
  return true;
}
/** What stands for a layer now: its outermost folded module, or itself. */
function standIn(layer) {
  let found = layer.node;
  for (let up = layer.node.parent; up; up = up.parent) if (!up.open) found = up;
  return found;
}
function visible() {
  return [...new Set(layers.map(standIn))];
}

// Rows of all columns stand at the same heights, so that the gaps between rows, and the gutters beside columns, hold no box:
// an edge to the next row runs in the gap, any other one in a lane of a gutter.
const W = 150, H = 34, GX = 26, GY = 26, LANE = 7, LANES = 24;
let nodes = [], edges = [], places = new Map(), columns = 1, extent = 0;
function layOut() {
  const of = layers.map(standIn);
  nodes = [...new Set(of)];
  const order = new Map(nodes.map((node, i) => [node, i]));
  const pairs = new Set(), before = nodes.map(() => []), after = nodes.map(() => []);
  edges = [];
  layers.forEach((layer, i) => layer.inputs.forEach(j => {
    const a = order.get(of[j]), b = order.get(of[i]), key = a * nodes.length + b;
    if (a === b || pairs.has(key)) return;
    pairs.add(key);
    edges.push([a, b]);
    if (a < b) { before[b].push(a); after[a].push(b); }
  }));
  const rank = nodes.map(() => 0), rows = [];
  nodes.forEach((node, i) => { rank[i] = before[i].reduce((most, j) => Math.max(most, rank[j] + 1), 0); (rows[rank[i]] ||= []).push(i); });
  const x = nodes.map(() => 0);
  const spread = row => row.forEach((i, k) => { x[i] = k - (row.length - 1) / 2; });
  const middle = (list, own) => list.length ? list.reduce((sum, j) => sum + x[j], 0) / list.length : own;
  rows.forEach(spread);
  for (const [list, near] of [[rows, before], [[...rows].reverse(), after], [rows, before]])
    for (const row of list) {
      const goal = new Map(row.map(i => [i, middle(near[i], x[i])]));
      row.sort((a, b) => goal.get(a) - goal.get(b));
      spread(row);
    }
  // a long chain is cut into columns, so that all of it is seen at once
  const box = canvas.getBoundingClientRect(), aspect = Math.max(0.5, (box.width || 900) / (box.height || 500));
  const widest = Math.max(1, ...rows.map(row => row.length));
  const perColumn = Math.max(6, Math.ceil(Math.sqrt(rows.length * widest * (W + GX) / (aspect * (H + GY)))));
  columns = Math.ceil(rows.length / perColumn);
  const columnOf = i => Math.floor(rank[i] / perColumn), rowOf = i => rank[i] % perColumn;
  const gutters = Array.from({length: columns}, () => []);  // at the right of each column
  for (const edge of edges) {
    const [a, b] = edge, from = columnOf(a), to = columnOf(b);
    edge.lane = null;
    if (rowOf(b) === rowOf(a) + 1) continue;
    edge.gutter = from < to ? to - 1 : to;
    edge.span = [rowOf(a) + 1, rowOf(b)].sort((one, other) => one - other);
    gutters[edge.gutter].push(edge);
  }
  const lanes = gutters.map(inside => {
    const ends = [];
    inside.sort((one, other) => one.span[0] - other.span[0] || one.span[1] - other.span[1]);
    for (const edge of inside) {
      let lane = ends.findIndex(end => end < edge.span[0]);
      if (lane < 0) lane = ends.length;
      ends[lane] = edge.span[1];
      edge.lane = lane % LANES;
    }
    return Math.min(ends.length, LANES);
  });
  let left = 0;
  places = new Map();
  for (let c = 0; c < columns; c++) {
    const part = rows.slice(c * perColumn, (c + 1) * perColumn), wide = Math.max(1, ...part.map(row => row.length)) * (W + GX);
    part.forEach((row, r) => row.forEach(i => places.set(nodes[i], {x: left + wide / 2 + x[i] * (W + GX), y: r * (H + GY)})));
    left += wide;
    for (const edge of gutters[c]) edge.x = left + edge.lane * LANE;
    left += lanes[c] * LANE + GX / 2;
  }
  extent = left - GX;
}
function badness(node) {
  if (node.leaf) return node.leaf[mode.key];
  const values = node.members.map(i => layers[i][mode.key]).filter(isNumber);
  if (!values.length) return null;
  return mode.bad === 'low' ? values.reduce((a, b) => Math.min(a, b)) : values.reduce((a, b) => Math.max(a, b));
}

// ---- graph: drawing

const canvas = $('canvas'), pen = canvas.getContext('2d');
const view = {x: 0, y: 0, k: 1};
let chosen = null, wanted = false, hits = new Set();
function redraw() { if (!wanted) { wanted = true; requestAnimationFrame(draw); } }
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function fit() {
  const all = [...places.values()];
  if (!all.length) return;
  const box = canvas.getBoundingClientRect();
  const x0 = Math.min(...all.map(p => p.x)) - W / 2 - 12, x1 = Math.max(extent, ...all.map(p => p.x + W / 2)) + 12;
  const y0 = Math.min(...all.map(p => p.y)) - GY, y1 = Math.max(...all.map(p => p.y)) + H + GY;
  view.k = Math.min(1.4, box.width / (x1 - x0), box.height / (y1 - y0));
  view.x = (box.width - (x0 + x1) * view.k) / 2;
  view.y = (box.height - (y0 + y1) * view.k) / 2;
  redraw();
}
function path(a, b, edge) {
  const start = a.y + H;
  pen.moveTo(a.x, start);
  if (edge.lane === null && Math.abs(a.x - b.x) < 1) { pen.lineTo(b.x, b.y); return; }
  if (edge.lane === null) { pen.bezierCurveTo(a.x, b.y, b.x, start, b.x, b.y); return; }
  const up = b.y < start + 2 * GY;
  if (up) pen.bezierCurveTo(a.x, start + GY, edge.x, start + GY, edge.x, start);
  else pen.bezierCurveTo(a.x, start + GY, edge.x, start, edge.x, start + GY);
  if (up) { pen.lineTo(edge.x, b.y); pen.bezierCurveTo(edge.x, b.y - GY, b.x, b.y - GY, b.x, b.y); return; }
  pen.lineTo(edge.x, b.y - GY);
  pen.bezierCurveTo(edge.x, b.y, b.x, b.y - GY, b.x, b.y);
}
function draw() {
  wanted = false;
  const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(box.width * ratio) || canvas.height !== Math.round(box.height * ratio)) {
    canvas.width = Math.round(box.width * ratio);
    canvas.height = Math.round(box.height * ratio);
  }
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.setTransform(ratio * view.k, 0, 0, ratio * view.k, ratio * view.x, ratio * view.y);
  const ink = style('--ink'), line = style('--faint'), mark = style('--mark'), back = style('--back');
  const inside = p => p.x + W / 2 > -view.x / view.k && p.x - W / 2 < (box.width - view.x) / view.k && p.y + H > -view.y / view.k && p.y < (box.height - view.y) / view.k;
  const top = -view.y / view.k, end = (box.height - view.y) / view.k, left = -view.x / view.k, right = (box.width - view.x) / view.k;
  const crosses = (a, b, at) => Math.max(a.y, b.y) + H + GY > top && Math.min(a.y, b.y) - GY < end && Math.max(a.x, b.x, at) > left && Math.min(a.x, b.x, at) < right;
  pen.lineWidth = Math.max(1, 0.6 / view.k);
  for (const bold of [false, true]) {
    pen.beginPath();
    for (const edge of edges) {
      const [a, b] = edge, own = nodes[a] === chosen || nodes[b] === chosen;
      if (own !== bold) continue;
      const from = places.get(nodes[a]), to = places.get(nodes[b]);
      if (crosses(from, to, edge.x ?? to.x)) path(from, to, edge);
    }
    pen.strokeStyle = bold ? mark : line;
    pen.globalAlpha = bold ? 1 : 0.7;
    if (bold) pen.lineWidth *= 2.2;
    pen.stroke();
  }
  pen.globalAlpha = 1;
  const label = view.k * H > 11;
  pen.font = '12px system-ui, sans-serif';
  pen.textBaseline = 'middle';
  for (const node of nodes) {
    const p = places.get(node);
    if (!inside(p)) continue;
    pen.fillStyle = colourOf(badness(node));
    pen.beginPath();
    if (node.leaf) pen.roundRect(p.x - W / 2, p.y, W, H, 5); else pen.rect(p.x - W / 2, p.y, W, H);
    pen.fill();
    if (!node.leaf) { pen.strokeStyle = ink; pen.lineWidth = 1.2; pen.strokeRect(p.x - W / 2 + 3, p.y + 3, W - 6, H - 6); }
    if (hits.size && !node.members.some(i => hits.has(i))) { pen.fillStyle = back; pen.globalAlpha = 0.75; pen.fill(); pen.globalAlpha = 1; }
    if (node === chosen) { pen.strokeStyle = mark; pen.lineWidth = Math.max(3.5, 2.5 / view.k); pen.stroke(); }
    if (label) {
      pen.fillStyle = inkOn(badness(node));
      const text = node.leaf ? node.label : `▸ ${node.label} (${node.members.length})`;
      pen.fillText(clipped(text, W - 14), p.x - W / 2 + 7, p.y + (node.leaf ? 11 : H / 2));
      if (node.leaf) pen.fillText(clipped(`${node.leaf.op || ''} ${mode.text(node.leaf[mode.key])}`, W - 14), p.x - W / 2 + 7, p.y + 25);
    }
  }
}
const widthsOf = new Map();
function clipped(text, room) {
  if (!widthsOf.has(text)) {
    let cut = text;
    while (cut.length > 4 && pen.measureText(cut).width > room) cut = cut.slice(0, Math.max(3, Math.floor(cut.length * 0.92) - 2)) + '…';
    widthsOf.set(text, cut);
  }
  return widthsOf.get(text);
}

// ---- graph: moving, choosing, folding

function zoom(factor, x, y) {
  const box = canvas.getBoundingClientRect();
  if (x === undefined) { x = box.width / 2; y = box.height / 2; }
  const k = Math.max(0.01, Math.min(6, view.k * factor));
  view.x = x - (x - view.x) * k / view.k;
  view.y = y - (y - view.y) * k / view.k;
  view.k = k;
  redraw();
}
function at(event) {
  const box = canvas.getBoundingClientRect();
  return {x: event.clientX - box.left, y: event.clientY - box.top};
}
function nodeAt(point) {
  const x = (point.x - view.x) / view.k, y = (point.y - view.y) / view.k;
  return nodes.find(node => { const p = places.get(node); return Math.abs(x - p.x) <= W / 2 && y >= p.y && y <= p.y + H; }) || null;
}
const fingers = new Map();
let moved = 0;
canvas.addEventListener('pointerdown', event => { canvas.setPointerCapture(event.pointerId); fingers.set(event.pointerId, at(event)); moved = 0; });
canvas.addEventListener('pointermove', event => {
  const last = fingers.get(event.pointerId);
  if (!last) { canvas.style.cursor = nodeAt(at(event)) ? 'pointer' : 'grab'; return; }
  const now = at(event), other = [...fingers].find(([id]) => id !== event.pointerId);
  if (other) {
    const span = (a, b) => Math.hypot(a.x - b.x, a.y - b.y);
    zoom(span(now, other[1]) / Math.max(1, span(last, other[1])), (now.x + other[1].x) / 2, (now.y + other[1].y) / 2);
  } else { view.x += now.x - last.x; view.y += now.y - last.y; }
  moved += Math.hypot(now.x - last.x, now.y - last.y);
  fingers.set(event.pointerId, now);
  redraw();
});
for (const name of ['pointerup', 'pointercancel']) canvas.addEventListener(name, event => {
  const alone = fingers.size === 1;
  fingers.delete(event.pointerId);
  if (name === 'pointerup' && alone && moved < 6) { const node = nodeAt(at(event)); if (node) choose(node); }
});
canvas.addEventListener('dblclick', event => { const node = nodeAt(at(event)); if (node) unfold(node); });
canvas.addEventListener('wheel', event => { event.preventDefault(); const p = at(event); zoom(Math.exp(-event.deltaY * 0.0015), p.x, p.y); }, {passive: false});
canvas.addEventListener('keydown', event => {
  const step = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
  if (step) choose(nodes[Math.max(0, Math.min(nodes.length - 1, chosen ? nodes.indexOf(chosen) + step : 0))], true);
  else if (event.key === 'Enter' && chosen) { if (chosen.leaf) $('panel').querySelector('button, summary')?.focus(); else unfold(chosen); }
  else if (event.key === 'Backspace' && chosen) foldAround(chosen);
  else if (event.key === '+' || event.key === '=') zoom(1.25);
  else if (event.key === '-') zoom(0.8);
  else if (event.key === '0') fit();
  else return;
  event.preventDefault();
});
function reveal(node) {
  const p = places.get(node), box = canvas.getBoundingClientRect();
  if (!p) return;
  if (view.k * H < 14) view.k = 14 / H;
  const x = p.x * view.k + view.x, y = p.y * view.k + view.y;
  if (x < W / 2 * view.k || x > box.width - W / 2 * view.k || y < 0 || y + H * view.k > box.height) {
    view.x = box.width / 2 - p.x * view.k;
    view.y = box.height / 2 - (p.y + H / 2) * view.k;
  }
  redraw();
}
function unfold(node) {
  if (node.leaf) return;
  node.open = true;
  layOut();
  choose(standIn(layers[node.members[0]]), true);
}
function foldAround(node) {
  let group = node.parent;
  while (group && single(group)) group = group.parent;
  if (!group || group === base || !group.parent) return;
  group.open = false;
  layOut();
  choose(group, true);
}
function choose(node, show = false) {
  chosen = node;
  if (show) reveal(node);
  redraw();
  $('said').textContent = node.leaf ? `${node.leaf.name}, ${node.leaf.op || ''}, ${mode.label} ${mode.text(node.leaf[mode.key])}` : `module ${node.path}, ${node.members.length} layers`;
  if (node.leaf) showLayer(node.leaf); else showModule(node);
  markRow(node.leaf);
}
function chooseLayer(layer) {
  let folded = false;
  for (let up = layer.node.parent; up; up = up.parent) if (!up.open) { up.open = true; folded = true; }
  if (folded) layOut();
  choose(layer.node, true);
}

// ---- panel

function facts(pairs) {
  return el('dl', {}, ...pairs.filter(([, value]) => value !== '' && value !== null && value !== undefined).flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));
}
function linkTo(i) {
  return el('button', {type: 'button', onclick: () => chooseLayer(layers[i])}, layers[i].name);
}
function showModule(node) {
  const worst = node.members.map(i => layers[i]).filter(layer => isNumber(layer[mode.key])).sort((a, b) => (mode.bad === 'low' ? 1 : -1) * (a[mode.key] - b[mode.key])).slice(0, 8);
  $('panel').replaceChildren(el('h3', {}, node.path), el('p', {}, `${node.members.length} layers, folded.`), el('button', {type: 'button', onclick: () => unfold(node)}, 'Unfold'),
    worst.length ? el('h3', {}, `Worst: ${mode.label}`) : '', el('div', {class: 'chips'}, ...worst.map(layer => linkTo(layer.index))));
}
function showLayer(layer) {
  const drawn = el('div'), chips = el('div', {class: 'chips'});
  const show = site => {
    for (const chip of chips.children) chip.setAttribute('aria-pressed', String(chip.dataset.name === site.name));
    drawn.replaceChildren(...siteParts(site));
  };
  for (const site of layer.rows) chips.append(el('button', {type: 'button', 'data-name': site.name, 'aria-pressed': 'false', onclick: () => show(site)}, site.name.startsWith(layer.name + '.') ? site.name.slice(layer.name.length + 1) : site.name));
  const folds = layer.node.parent !== base ? el('button', {type: 'button', onclick: () => foldAround(layer.node)}, 'Fold its module') : null;
  $('panel').replaceChildren(...[
    el('h3', {}, layer.name),
    facts([
      ['operator', layer.op], ['costs at the outputs', db(layer.cost_db)], ['error made here', db(layer.made_db)], ['made with quantized inputs', db(layer.made_quantized_db)],
      ['error arrived', db(layer.arrived_db)], ['error after', db(layer.after_db)], ['lost here', isNumber(layer.jump) ? db(layer.jump) : ''], ['made, in steps (LSB)', isNumber(layer.made_lsb) ? short(layer.made_lsb) : ''],
      ['width', layer.bits ? `${layer.bits} bits` : 'float'], ['multiplications', count(layer.multiplications)],
    ]),
    ...(layer.causes || []).map(cause => el('div', {class: 'cause'}, cause.text, cause.remedy ? el('div', {}, el('b', {}, 'Remedy: '), cause.remedy) : null)),
    layer.rows.length ? el('h3', {}, 'Sites') : null, chips, drawn,
    layer.inputs.length ? el('h3', {}, 'Reads from') : null, el('div', {class: 'chips'}, ...layer.inputs.slice(0, 12).map(linkTo)),
    readers[layer.index].length ? el('h3', {}, 'Read by') : null, el('div', {class: 'chips'}, ...readers[layer.index].slice(0, 12).map(linkTo)), folds,
  ].filter(Boolean));
  const first = layer.rows.filter(site => site.histogram).sort((a, b) => (b.noise || 0) - (a.noise || 0))[0] || layer.rows[0];
  if (first) show(first);
}
function siteParts(site) {
  const grid = site.grid;
  return [
    facts([
      ['role', site.role], ['format', site.spec || site.dtype || ''], ['state', site.enabled ? 'quantized' : `float${site.why_float ? ': ' + site.why_float : ''}`],
      ['costs at the outputs', db(site.sqnr_db ?? costOf(site.noise))], ['outputs with only this', db(site.only_db)], ['outputs without this', db(site.without_db)],
      ['metric with only this', short(site.metric_only)], ['metric without this', short(site.metric_without)],
      ['values', isNumber(site.minimum) ? `${short(site.minimum)} to ${short(site.maximum)}` : ''], ['grid', grid ? `${short(grid.low)} to ${short(grid.high)}${grid.steps ? `, ${grid.steps} steps` : ''}` : ''],
      ['step (LSB)', short(site.lsb)], ['clipped', percent(site.clipped)], ['codes used by 99 % of values', percent(site.codes_used)], ['shares its grid with', site.shared_with],
    ]),
    site.histogram ? histogram(site) : null, site.channels ? channelPlot(site) : null,
  ].filter(Boolean);
}
function histogram(site) {
  const {edges, counts} = site.histogram, grid = site.grid, w = 380, h = 150, base = h - 34;
  let low = edges[0], high = edges[edges.length - 1];
  if (grid) {  // a grid far wider than the values is shown to its ends: that is the fault then
    low = Math.min(low, grid.low); high = Math.max(high, grid.high);
  }
  const margin = (high - low) * 0.03 || 1;
  low -= margin; high += margin;
  const x = value => (value - low) / (high - low) * w, most = Math.max(...counts, 1);
  const log = el('input', {type: 'checkbox'}), box = svg('svg', {viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': `Histogram of the values at ${site.name}`});
  const paint = () => {
    const height = n => (log.checked ? Math.log1p(n) / Math.log1p(most) : n / most) * (base - 12);
    box.replaceChildren();
    if (grid) {
      box.append(svg('rect', {class: 'out', x: 0, y: 0, width: Math.max(0, x(grid.low)), height: base}), svg('rect', {class: 'out', x: x(grid.high), y: 0, width: Math.max(0, w - x(grid.high)), height: base}));
      const steps = grid.steps, wide = steps ? (x(grid.high) - x(grid.low)) / steps : 0;
      if (wide >= 3) for (let i = 0; i <= steps; i++) box.append(svg('line', {class: 'axis', x1: x(grid.low) + i * wide, x2: x(grid.low) + i * wide, y1: 0, y2: base}));
    }
    box.append(svg('path', {class: 'bars', d: counts.map((n, i) => n ? `M${x(edges[i]).toFixed(2)},${base}v${-Math.max(0.8, height(n)).toFixed(2)}h${Math.max(0.6, x(edges[i + 1]) - x(edges[i])).toFixed(2)}V${base}z` : '').join('')}));
    box.append(svg('line', {class: 'axis', x1: 0, x2: w, y1: base, y2: base}));
    if (grid) {
      for (const end of [grid.low, grid.high]) box.append(svg('line', {class: 'edge', x1: x(end), x2: x(end), y1: 0, y2: base + 8}));
      const from = Math.max(site.minimum ?? edges[0], grid.low), to = Math.min(site.maximum ?? edges[edges.length - 1], grid.high);
      box.append(svg('rect', {class: 'grid', x: x(grid.low), y: base + 3, width: Math.max(1, x(grid.high) - x(grid.low)), height: 6}));
      if (to >= from) box.append(svg('rect', {class: 'used', x: x(from), y: base + 3, width: Math.max(1, x(to) - x(from)), height: 6}));
      box.append(svg('text', {x: 3, y: h - 3}, `grid ${short(grid.low)} … ${short(grid.high)}`));
    }
    const used = [isNumber(site.clipped) ? `clipped ${percent(site.clipped)}` : '', isNumber(site.codes_used) ? `codes used ${percent(site.codes_used)}` : ''].filter(Boolean).join(', ');
    box.append(svg('text', {x: w - 3, y: h - 3, 'text-anchor': 'end'}, used), svg('text', {x: 3, y: base + 20}, short(low + margin)), svg('text', {x: w - 3, y: base + 20, 'text-anchor': 'end'}, short(high - margin)));
  };
  log.addEventListener('change', paint);
  paint();
  return el('div', {}, el('h3', {}, 'Values'), box, el('label', {class: 'hint'}, log, ' logarithmic'));
}
function channelPlot(site) {
  const {low, high, step, count: channels} = site.channels, grid = site.grid, w = 380, h = 130;
  let least = Math.min(...low), most = Math.max(...high);
  if (grid) { least = Math.min(least, grid.low); most = Math.max(most, grid.high); }
  const y = value => 6 + (most - value) / ((most - least) || 1) * (h - 26), wide = w / low.length;
  const box = svg('svg', {viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': `Ranges of the channels at ${site.name}`});
  box.append(svg('path', {class: 'span', 'stroke-width': Math.max(0.8, wide * 0.7), d: low.map((from, i) => `M${((i + 0.5) * wide).toFixed(2)},${y(from).toFixed(2)}V${Math.min(y(high[i]), y(from) - 0.8).toFixed(2)}`).join('')}));
  if (grid) for (const end of [grid.low, grid.high]) box.append(svg('line', {class: 'edge', x1: 0, x2: w, y1: y(end), y2: y(end)}));
  box.append(svg('text', {x: 3, y: h - 4}, step > 1 ? `${channels} channels, ${step} joined per line` : `${low.length} channels`), svg('text', {x: w - 3, y: h - 4, 'text-anchor': 'end'}, `${short(least)} … ${short(most)}`));
  return el('div', {}, el('h3', {}, 'Range of each channel'), box);
}

// ---- table of layers

const COLUMNS = [
  ['name', 'layer', layer => layer.name], ['op', 'operator', layer => layer.op || ''], ['bits', 'bits', layer => layer.bits ?? ''],
  ['cost_db', 'cost at outputs', layer => db(layer.cost_db)], ['made_db', 'made', layer => db(layer.made_db)], ['arrived_db', 'arrived', layer => db(layer.arrived_db)], ['after_db', 'after', layer => db(layer.after_db)],
  ['jump', 'lost here', layer => db(layer.jump)], ['made_lsb', 'LSB', layer => short(layer.made_lsb)], ['multiplications', 'multiplications', layer => count(layer.multiplications)],
  ['cause', 'cause', layer => (layer.causes || []).map(cause => cause.text).join('; ')],
].filter(([key]) => ['name', 'op', 'bits'].includes(key) || (key === 'cause' ? layers.some(layer => (layer.causes || []).length) : any(key)));
let sorted = {key: any('cost_db') ? 'cost_db' : 'order', up: true}, shownRows = 200, listed = [];
const keyOf = (layer, key) => key === 'order' ? layer.index : key === 'cause' ? (layer.causes || []).map(cause => cause.text).join('; ') || null : layer[key] ?? null;
function fillTable() {
  const text = $('filter').value.toLowerCase(), op = $('op').value, only = $('quantized').checked;
  listed = layers.filter(layer => (!op || layer.op === op) && (!only || layer.bits !== null) && (!text || `${layer.name} ${layer.op} ${keyOf(layer, 'cause') || ''}`.toLowerCase().includes(text)));
  const by = layer => keyOf(layer, sorted.key);
  listed.sort((a, b) => {
    const one = by(a), other = by(b);
    if (one === null || other === null) return one === other ? a.index - b.index : one === null ? 1 : -1;
    const sign = typeof one === 'string' ? one.localeCompare(other, undefined, {numeric: true}) : one - other;
    return (sorted.up ? sign : -sign) || a.index - b.index;
  });
  $('count').textContent = `${listed.length} of ${layers.length} layers`;
  drawRows();
}
function drawRows() {
  $('table').tHead.replaceChildren(el('tr', {}, ...COLUMNS.map(([key, title]) => el('th', {scope: 'col', 'aria-sort': sorted.key === key ? (sorted.up ? 'ascending' : 'descending') : 'none'},
    el('button', {type: 'button', 'data-key': key, title: meaning(key), onclick: () => { sorted = {key, up: sorted.key === key ? !sorted.up : true}; fillTable(); $('table').querySelector(`[data-key="${key}"]`).focus(); }}, title + (sorted.key === key ? (sorted.up ? ' ▲' : ' ▼') : ''))))));
  $('table').tBodies[0].replaceChildren(...listed.slice(0, shownRows).map(rowOf));
  $('more').hidden = listed.length <= shownRows;
  $('more').textContent = `Show more (${listed.length - shownRows} left)`;
}
function rowOf(layer) {
  const go = () => { chooseLayer(layer); };
  return el('tr', {tabindex: 0, 'data-index': layer.index, 'aria-selected': String(chosen === layer.node), onclick: go, onkeydown: event => {
    if (event.key === 'Enter') go();
    else if (event.key === 'ArrowDown') event.currentTarget.nextElementSibling?.focus();
    else if (event.key === 'ArrowUp') event.currentTarget.previousElementSibling?.focus();
    else return;
    event.preventDefault();
  }}, ...COLUMNS.map(([key, , text], i) => {
    const value = text(layer), cell = el('td', {class: isNumber(layer[key]) ? 'num' : false});
    if (!i) cell.append(el('span', {class: 'swatch', style: `background:${colourOf(layer[mode.key])}`}));
    cell.append(String(value));
    return cell;
  }));
}
function markRow(layer) {
  for (const row of $('table').tBodies[0].rows) {
    const own = layer !== null && Number(row.dataset.index) === layer.index;
    row.setAttribute('aria-selected', String(own));
    if (own && document.activeElement === canvas) row.scrollIntoView({block: 'nearest'});
  }
}

// ---- the other sections

function coverage() {
  const found = doc.coverage;
  if (!found || !(found.rows || []).length) return;
  const by = new Map();
  for (const row of found.rows) if (row.status === 'float') by.set(row.how, (by.get(row.how) || 0) + 1);
  const reasons = [...by].sort((a, b) => b[1] - a[1]);
  const counts = found.counts ? Object.entries(found.counts).map(([status, n]) => `${n} ${status}`).join(', ') : `${found.rows.length} in float`;
  section('coverage', 'Coverage', el('p', {}, counts),
    reasons.length ? el('div', {}, el('h3', {}, 'Why values are in float'), plainTable(['values', 'reason'], reasons.map(([why, n]) => [n, why]))) : null,
    lazily(`All ${found.rows.length} values`, () => plainTable(['value', 'operator', 'shape', 'status', 'how'], found.rows.map(row => [row.name, row.op_type || '', (row.shape || []).join(' × '), row.status, row.how]))),
    (found.notes || []).length ? lazily(`${found.notes.length} notes`, () => el('ul', {}, ...found.notes.map(note => el('li', {}, note)))) : null);
}
function recipe() {
  const steps = doc.recipe && doc.recipe.outcomes;
  if (!steps || !steps.length) return;
  const signed = value => isNumber(value) ? el('span', {class: value < 0 ? 'bad' : 'good'}, (value > 0 ? '+' : '') + short(value)) : '';
  const columns = [
    ['step', step => step.step], ['metric', step => step.metric], ['change', step => signed(step.change)],
    ['outputs before', step => step.sqnr ? db(step.sqnr[0]) : ''], ['outputs after', step => step.sqnr ? db(step.sqnr[1]) : ''],
    ['gain', step => step.sqnr ? signed(+(step.sqnr[1] - step.sqnr[0]).toFixed(2)) : ''], ['kept', step => step.kept ? 'yes' : 'no'], ['note', step => step.note],
  ].filter(([, text]) => steps.some(step => ![null, undefined, ''].includes(text(step))));
  section('recipe', 'Recipe', doc.recipe.judged ? el('p', {}, `Outputs compared with float ${doc.recipe.judged}.`) : null,
    plainTable(columns.map(([name]) => name), steps.map(step => columns.map(([, text]) => text(step)))));
}
function compression() {
  const parts = (doc.compression || []).map(done => {
    const tried = done.tried || [], costs = [...new Set(tried.flatMap(one => Object.keys(one.left)))], first = costs[0];
    const points = tried.filter(one => isNumber(one.sqnr_db) && isNumber(one.left[first]));
    const drawn = points.map(one => ({x: 100 * one.left[first], y: one.sqnr_db, label: 'choice', chosen: one.chosen}));
    return el('div', {}, done.step ? el('h3', {}, done.step) : null, el('p', {}, done.summary),
      done.costs.length ? plainTable(['cost', 'before', 'after', 'left'], done.costs.map(([name, before, after]) => [name, before, after, percent(after / before)])) : null,
      done.table.rows.length ? plainTable(done.table.head, done.table.rows) : null,
      drawn.length > 1 ? el('div', {}, el('h3', {}, 'Choices that were measured'), scatter(drawn, `% of the ${first}`, 'dB of the outputs', 'Choices that were measured')) : null,
      tried.length ? lazily(`${tried.length} choices`, () => plainTable([...costs.map(name => `${name} left`), 'outputs', 'metric', 'chosen'], tried.map(one => [...costs.map(name => percent(one.left[name])), db(one.sqnr_db), one.metric, one.chosen ? 'yes' : '']))) : null,
      done.refused.length ? el('div', {}, el('h3', {}, 'Not touched'), plainTable(['part', 'why'], done.refused)) : null);
  });
  section('compression', 'Compression', ...parts);
}
function remedies() {
  if (doc.remedies.length) section('remedies', 'Remedies tried', plainTable(['remedy', 'layers', 'before', 'after', 'metric before', 'metric after', 'kept'], doc.remedies.map(row => [row.remedy, (row.layers || []).join(', '), db(row.before_db), db(row.after_db), row.metric_before, row.metric_after, row.kept ? 'yes' : 'no'])));
  if (doc.groups.length) section('groups', 'Groups of sites', plainTable(['group', 'sites', 'costs at the outputs', 'only this', 'all but this'], doc.groups.map(row => [row.name, (row.sites || []).length, db(costOf(row.noise)), db(row.only_db), db(row.without_db)])));
}
/** A chart of points, with what each axis is. */
function scatter(points, xTitle, yTitle, label) {
  const w = 640, h = 300, xs = points.map(p => p.x), ys = points.map(p => p.y);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = v => 50 + (v - x0) / ((x1 - x0) || 1) * (w - 90), y = v => h - 40 - (v - y0) / ((y1 - y0) || 1) * (h - 70);
  const box = svg('svg', {viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': label});
  box.append(svg('line', {class: 'axis', x1: 40, x2: w - 20, y1: h - 30, y2: h - 30}), svg('line', {class: 'axis', x1: 40, x2: 40, y1: 20, y2: h - 30}));
  for (const p of points) {
    const dot = svg('circle', {class: p.chosen ? 'point chosen' : 'point', cx: x(p.x), cy: y(p.y), r: p.chosen ? 7 : 5});
    dot.append(svg('title', {}, `${p.label || ''}: ${short(p.x)}, ${short(p.y)}`));
    box.append(dot);
  }
  box.append(svg('text', {x: w - 20, y: h - 12, 'text-anchor': 'end'}, `${xTitle}: ${short(x0)} … ${short(x1)}`), svg('text', {x: 4, y: 14}, `${yTitle}: ${short(y0)} … ${short(y1)}`));
  return box;
}
function pareto() {
  const points = doc.pareto && doc.pareto.points;
  if (!points || !points.length) return;
  section('pareto', 'Pareto points', scatter(points, doc.pareto.x || '', doc.pareto.y || '', 'Pareto points'), plainTable(['point', doc.pareto.x || 'x', doc.pareto.y || 'y', 'chosen'], points.map(p => [p.label || '', p.x, p.y, p.chosen ? 'yes' : ''])));
}
function verification() {
  const found = doc.verification;
  if (!found) return;
  const rows = found.rows || [], bad = rows.filter(row => row.verdict === 'fails');
  const table = list => plainTable(['site', 'operators', 'kernel', 'equal (float)', 'LSB', 'equal (integer)', 'LSB', 'verdict', 'reason'], list.map(row => [row.site, (row.ops || []).join(' '), row.kernel, percent(row.as_float.equal), row.as_float.lsb, percent(row.as_integer.equal), row.as_integer.lsb, row.verdict, row.reason || '']));
  section('verification', 'Verification against the runtime', el('p', {class: found.ok ? 'good' : 'bad'}, `${rows.length - bad.length} of ${rows.length} places agree or are within what their kernel may do: ${found.ok ? 'ok' : 'not ok'}.`),
    ...(found.outputs || []).map(end => el('p', {}, `output ${end.name}: ${typeof end.as_float === 'string' ? end.as_float : db(end.as_float)} with float kernels, ${typeof end.as_integer === 'string' ? end.as_integer : db(end.as_integer)} with integer kernels`)),
    ...['unchecked', 'failures', 'idle'].flatMap(key => Object.entries(found[key] || {}).map(([name, why]) => el('p', {}, `${{unchecked: 'not compared', failures: 'does not run', idle: 'did not run'}[key]}: ${name}: ${why}`))),
    bad.length ? table(bad) : null, rows.length ? lazily(`All ${rows.length} places`, () => table(rows)) : null);
}
function health() {
  const found = doc.health;
  if (!found) return;
  if (found.culprits) {
    section('health', 'Health', el('p', {class: found.ok ? 'good' : 'bad'}, found.ok ? 'Nothing that is not finite reaches an output.' : 'Values that are not finite are made:'), ...found.culprits.map(c => el('div', {class: 'cause'}, el('b', {}, c.op), ` (${c.op_type}): ${c.problem}`, el('div', {}, el('b', {}, 'Remedy: '), c.remedy))));
    return;
  }
  const noted = (found.rows || []).filter(row => (row.notes || []).length);
  section('health', 'Health', el('p', {}, `${(found.rows || []).length} sites looked at, ${noted.length} with notes.`), noted.length ? plainTable(['site', 'notes'], noted.map(row => [row.site, row.notes.join('; ')])) : null);
}
function filesOf() {
  if (doc.files.length) section('files', 'Files', plainTable(['file', 'size'], doc.files.map(file => [file.name, bytes(file.size)])));
}

// ---- start

function legend() {
  const low = mode.bad === 'low' ? scale.high : scale.low, high = mode.bad === 'low' ? scale.low : scale.high;
  $('legend').replaceChildren(mode.text(low) || '', el('i', {style: `background:linear-gradient(90deg,${[0, 0.25, 0.5, 0.75, 1].map(ramp).join(',')})`, 'aria-hidden': 'true'}), mode.text(high) || '', ' (grey: not measured, or in float)');
}
const READING = [
  ['dB', 'Signal to quantization noise; more is better. 40 dB: the noise is 1 % of the signal, 30 dB: 3 %, 20 dB: 10 %; "exact": none.'],
  ['cost at the outputs', 'The outputs against float if only the quantizers of this layer worked.'],
  ['made', 'The error that the layer makes itself, on the inputs of the float model.'],
  ['arrived', 'The error in its inputs, which earlier layers made.'],
  ['after', 'The error of its output in the quantized model: arrived and made together.'],
  ['lost here', 'What the layer loses: arrived less after.'],
  ['LSB', 'Steps of the grid: the error made, in units of what one code is worth.'],
];
const MEANS = {cost_db: 'cost at the outputs', made_db: 'made', arrived_db: 'arrived', after_db: 'after', jump: 'lost here', made_lsb: 'LSB'};
const meaning = key => (READING.find(([name]) => name === MEANS[key]) || [])[1];
function reading() {
  const shown = new Set(Object.entries(MEANS).filter(([key]) => any(key)).map(([, name]) => name));
  if (shown.size) shown.add('dB');
  const rows = READING.filter(([name]) => shown.has(name));
  $('reading').replaceChildren(...rows.flatMap(([name, text]) => [el('dt', {}, name), el('dd', {}, text)]));
}
$('static').remove();
tiles();
reading();
for (const note of doc.notes.slice(0, 12)) $('notes').append(el('p', {class: 'hint'}, note));
if (doc.notes.length > 12) $('notes').append(lazily(`${doc.notes.length - 12} more notes`, () => el('div', {}, ...doc.notes.slice(12).map(note => el('p', {class: 'hint'}, note)))));
if (layers.length) {
  $('graph').hidden = $('layers').hidden = false;
  $('mode').append(...MODES.map((one, i) => el('option', {value: i}, one.label)));
  $('mode').addEventListener('change', () => { mode = MODES[Number($('mode').value)]; scale = scaleOf(mode); legend(); drawRows(); redraw(); if (chosen) choose(chosen); });
  $('names').append(...layers.slice(0, 2000).map(layer => el('option', {value: layer.name})));
  const search = go => {
    const text = $('search').value.toLowerCase();
    hits = new Set(text ? layers.filter(layer => `${layer.name} ${layer.op}`.toLowerCase().includes(text)).map(layer => layer.index) : []);
    if (go && hits.size) chooseLayer(layers.find(layer => layer.name.toLowerCase() === text) || layers[[...hits][0]]);
    $('said').textContent = text ? `${hits.size} layers match` : '';
    redraw();
  };
  $('search').addEventListener('input', () => search(false));
  $('search').addEventListener('change', () => search(true));
  $('zoomin').addEventListener('click', () => zoom(1.25));
  $('zoomout').addEventListener('click', () => zoom(0.8));
  $('fit').addEventListener('click', fit);
  $('unfold').addEventListener('click', () => { groups.forEach(group => { group.open = true; }); layOut(); fit(); });
  $('fold').addEventListener('click', () => { foldAll(); layOut(); if (chosen) chosen = chosen.leaf ? standIn(chosen.leaf) : chosen; fit(); });
  const kinds = [...new Set(layers.map(layer => layer.op || ''))].sort();
  $('op').append(el('option', {value: ''}, 'all'), ...kinds.map(kind => el('option', {value: kind}, kind)));
  for (const id of ['filter', 'op', 'quantized']) $(id).addEventListener('input', () => { shownRows = 200; fillTable(); });
  $('more').addEventListener('click', () => { shownRows += 400; drawRows(); });
  openFirst();
  legend();
  layOut();
  fit();
  fillTable();
  new ResizeObserver(() => redraw()).observe(canvas);
  if (listed.length) choose(standIn(listed[0]));
  fit();
}
compression(); coverage(); recipe(); remedies(); pareto(); verification(); health(); filesOf();
for (const part of document.querySelectorAll('section:not([hidden])')) $('nav').append(el('a', {href: '#' + part.id}, part.querySelector('h2').textContent));
$('theme').addEventListener('click', () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  redraw();
});
document.documentElement.dataset.ready = 'yes';
})();
