/* A click on a tile shows it large, with its tokens; a click on a token, or a row under the pointer, shows the weights of
   this query in the text, and the heads with the largest weights for it. */
const tokens = [...document.querySelectorAll("#tokens span")], names = tokens.map(token => token.textContent);
const tiles = [...document.querySelectorAll(".tile")], heads = tiles.filter(tile => !("low" in tile.dataset));
const large = document.querySelector("#large"), length = tokens.length;
const tables = new Map();
let current = heads[0], query = 0;

/* A value of a tile is coded as the opacity of its pixel, as looks.Tile says. */
async function read(tile) {
  const image = tile.querySelector("img"), canvas = document.createElement("canvas");
  await image.decode();
  canvas.width = canvas.height = length;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const {low, high} = tile.dataset, pixels = context.getImageData(0, 0, length, length).data;
  const value = opacity => low === undefined ? (opacity / 255) ** 2
    : opacity ? +low + (high - low) * (opacity - 1) / 254 : NaN;
  const shades = Array.from({length: length * length}, (_, index) => pixels[4 * index + 3]);
  tables.set(tile, {shades, values: shades.map(value)});
}

function element(parent, name, attributes, text = "") {
  const made = document.createElementNS(parent.namespaceURI, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.textContent = text;
  parent.append(made);
  return made;
}

const shown = (tile, value) => isNaN(value) ? "masked"
  : "low" in tile.dataset ? value.toPrecision(3) : (100 * value).toFixed(value < 0.1 ? 1 : 0) + "%";

function draw() {
  const margin = 84, cell = Math.max(12, Math.min(26, (large.clientWidth - margin - 4) / length));
  const {shades, values} = tables.get(current), size = margin + cell * length;
  large.replaceChildren();
  element(large, "h3", {}, `head ${current.innerText.trim()}`);
  const scroll = element(large, "div", {class: "scroll"});
  scroll.innerHTML = `<svg width="${size}" height="${size}"></svg>`;
  const svg = scroll.firstChild;
  const clipped = name => name.length > 12 ? name.slice(0, 11) + "…" : name;
  names.forEach((name, index) => {
    const middle = margin + cell * (index + 0.5);
    element(svg, "text", {x: margin - 6, y: middle, class: "row"}, clipped(name));
    element(svg, "text", {transform: `translate(${middle} ${margin - 6}) rotate(-90)`}, clipped(name));
  });
  shades.forEach((shade, index) => element(svg, "rect", {
    x: margin + cell * (index % length), y: margin + cell * Math.floor(index / length), width: cell, height: cell,
    "fill-opacity": (shade / 255).toFixed(3)}));
  const frame = element(svg, "rect", {class: "frame", width: cell * length, height: cell, x: margin});
  const readout = element(large, "p", {class: "readout"}), strongest = element(large, "div", {class: "strongest"});
  const point = (row, column) => {
    query = row;
    const weights = values.slice(length * row, length * (row + 1)), best = column ?? weights.indexOf(Math.max(...weights));
    frame.setAttribute("y", margin + cell * row);
    readout.textContent = `${names[row]} → ${names[best]}: ${shown(current, values[length * row + best])}`;
    tokens.forEach((token, index) => {
      const shade = Math.round(shades[length * row + index] / 255 * 70);
      token.style.background = `color-mix(in srgb, var(--blue) ${shade}%, transparent)`;
      token.classList.toggle("query", index === row);
    });
    strongest.replaceChildren();
    element(strongest, "p", {class: "quiet"}, `Largest weights for ${names[row]}`);
    const found = heads.map(tile => {
      const of_row = tables.get(tile).values.slice(length * row, length * (row + 1)), weight = Math.max(...of_row);
      return {tile, weight, key: names[of_row.indexOf(weight)]};
    }).sort((a, b) => b.weight - a.weight);
    for (const {tile, weight, key} of found.slice(0, 8)) {
      const text = `${tile.dataset.name} → ${key} ${shown(tile, weight)}`;
      element(strongest, "button", {}, text).addEventListener("click", () => show(tile));
    }
  };
  const follow = event => {
    const box = svg.getBoundingClientRect();
    const [column, row] = [event.clientX - box.left, event.clientY - box.top].map(at => Math.floor((at - margin) / cell));
    if (row >= 0 && column >= 0 && row < length && column < length) point(row, column);
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  tokens.forEach((token, index) => token.onclick = () => point(index));
  point(query);
}

function show(tile) {
  current = tile;
  tiles.forEach(other => other.toggleAttribute("data-shown", other === tile));
  draw();
}

Promise.all(tiles.map(read)).then(() => {
  large.hidden = false;
  show(current);
  tiles.forEach(tile => tile.addEventListener("click", () => {
    show(tile);
    large.scrollIntoView({block: "nearest"});
  }));
  window.addEventListener("resize", draw);
});
