"use strict";
const tip = document.getElementById("tip");

function show(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}

function point(nodes, cell) {
  const mine = new Set(cell ? cell.dataset.groups.split(" ") : []);
  nodes.classList.toggle("pointed", cell !== null);
  for (const other of nodes.querySelectorAll(".cell")) {
    other.classList.toggle("self", other === cell);
    other.classList.toggle("member", other === cell || other.dataset.groups.split(" ").some(group => mine.has(group)));
  }
}

document.addEventListener("pointermove", event => {
  const owner = event.target.closest("[data-tip]");
  if (owner) show(owner.dataset.tip, event); else if (!event.target.closest(".curve")) tip.hidden = true;
});

for (const nodes of document.querySelectorAll(".nodes")) {
  nodes.addEventListener("pointerover", event => point(nodes, event.target.closest(".cell")));
  nodes.addEventListener("pointerleave", () => point(nodes, null));
}

for (const svg of document.querySelectorAll(".curve:not(.overlay)")) {
  const steps = JSON.parse(svg.dataset.steps), values = JSON.parse(svg.dataset.values);
  const points = svg.querySelector("polyline").points, cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", event => {
    if (!steps.length) return;
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const near = nearest(points, x);
    cursor.removeAttribute("hidden");
    cursor.setAttribute("transform", `translate(${points[near].x} 0)`);
    cursor.querySelector("circle").setAttribute("cy", points[near].y);
    show(`step ${steps[near]}\n${values[near]}`, event);
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("hidden", ""); tip.hidden = true; });
}

function nearest(points, x) {
  let near = 0;
  for (let i = 1; i < points.length; i++) if (Math.abs(points[i].x - x) < Math.abs(points[near].x - x)) near = i;
  return near;
}

for (const svg of document.querySelectorAll(".overlay")) {
  const cursor = svg.querySelector(".cursor");
  const lines = [...svg.querySelectorAll("g[data-label]")].map(g => ({
    label: g.dataset.label, at: JSON.parse(g.dataset.at), values: JSON.parse(g.dataset.values), points: g.querySelector("polyline").points,
  }));
  svg.addEventListener("pointermove", event => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const said = lines.map(line => {
      const near = nearest(line.points, x);
      return `${line.label}: ${line.values[near]} (${svg.dataset.along} ${line.at[near]})`;
    });
    cursor.removeAttribute("hidden");
    cursor.setAttribute("transform", `translate(${x} 0)`);
    show(said.join("\n"), event);
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("hidden", ""); tip.hidden = true; });
}
