// The form's own controls: prompt, shape and length.

import { byId, fill, h, mark } from "./dom.js";
import { canvasOf, lengthText } from "./request.js";
import { count } from "./rules.js";

/** How many bytes a prompt has; those up to the limit of tokens fit for certain, since a token is at least a byte. */
export function promptNote(form, limits) {
  const size = new TextEncoder().encode(form.prompt).length;
  const sure = limits.prompt.max_tokens;
  if (size > sure) return `${count(size)} bytes: the server counts whether these are at most ${count(sure)} tokens.`;
  return size > sure * 0.8 ? `${count(size)} of ${count(sure)} bytes that fit for certain.` : "";
}

/** The radio tiles of the shapes that go with the task. */
export function renderShapes(form, limits, change) {
  const tiles = Object.entries(limits.size.by_aspect_ratio).map(([name, size]) => [name, ...size.split("x").map(Number)]);
  const choices = [
    ...(form.task === "fl2va" ? [["picture", 0, 0]] : []),
    ...tiles.sort((a, b) => widthOf(b[0]) - widthOf(a[0])),
    ["custom", 0, 0],
  ];
  const shown = `${form.task} ${form.shape}`;
  if (byId("shapes").dataset.shown !== shown) fill(byId("shapes"), choices.map((choice) => tile(choice, form, change)));
  byId("shapes").dataset.shown = shown;
  byId("custom-size").hidden = form.shape !== "custom";
  for (const side of ["width", "height"]) {
    const input = byId(side);
    if (input.value !== form[side]) input.value = form[side];
    input.step = limits.size.multiple_px;
  }
}

const widthOf = (name) => name.split(":").reduce((width, height) => width / height);

const WORDS = { picture: "As picture", custom: "Custom" };

function tile([name, width, height], form, change) {
  const longest = 26;
  const scale = width ? longest / Math.max(width, height) : 0;
  const style = width ? { width: `${width * scale}px`, height: `${height * scale}px` } : {};
  return h(
    "label",
    { class: "tile" },
    h("input", {
      type: "radio",
      name: "shape",
      id: `shape-${name.replace(":", "-")}`,
      value: name,
      checked: form.shape === name,
      on: { change: () => change({ shape: name }) },
    }),
    h("span", { class: "tile-body" }, h("i", { class: width ? "outline" : "outline dashed", style }), WORDS[name] ?? name),
  );
}

/** What the shape comes to. */
export function renderShapeNote(form, limits, problem) {
  const canvas = canvasOf(form, limits);
  const words = canvas ? `${canvas.width} × ${canvas.height} px` : "The first picture decides.";
  mark(byId("width"), byId("shape-note"), problem, words);
}

export function renderLength(form, limits) {
  const slider = byId("length");
  const steps = limits.length.num_frames;
  slider.max = steps.length - 1;
  slider.value = steps.indexOf(form.frames);
  const words = lengthText(form.frames);
  slider.setAttribute("aria-valuetext", words);
  slider.style.setProperty("--share", `${(100 * slider.value) / slider.max}%`);
  byId("length-text").textContent = words;
}
