// Frames and references: added by drop or choice, in order, moved by button or drag, each with what the model reads of it.

import { announce, byId, fill, h } from "./dom.js";
import { icon } from "./icons.js";
import { canvasOf } from "./request.js";
import { bytes, labels, seconds, used } from "./rules.js";

const ACCEPT = { image: "image/*", any: "image/*,video/*,audio/*" };
const DRAGGED = "application/x-h3-reference";

/** Draw the media part of the form. `act`: add(files, place), remove, move, edit, swap, insert. */
export function renderMedia(form, limits, problems, act) {
  const area = byId("media");
  const media = [form.first, form.last, ...form.references].map((item) => item && { ...item, file: null });
  const shown = JSON.stringify([form.task, form.frames, canvasOf(form, limits), media, problems]);
  if (area.dataset.shown === shown) return; // a preview that plays goes on while the prompt is typed
  area.dataset.shown = shown;
  area.hidden = form.task === "t2va";
  if (form.task === "fl2va") fill(area, frames(form, limits, problems, act));
  else if (form.task === "ref2va") fill(area, references(form, limits, problems, act));
  else fill(area);
}

function frames(form, limits, problems, act) {
  const canvas = canvasOf(form, limits);
  const slot = (place, title) => {
    const item = form[place];
    const body = item
      ? frameCard(item, title, fitted(item, form, canvas), problems[item.id], () => act.remove(item))
      : drop(`drop-${place}`, `${title}: choose or drop a picture`, "Drop a picture or choose one", ACCEPT.image, place, act);
    return h("div", { class: "slot" }, h("p", { class: "slot-title" }, title), body);
  };
  const swap = h(
    "button",
    {
      type: "button",
      id: "swap",
      class: "plain",
      disabled: !form.first && !form.last,
      on: { click: () => act.swap() },
    },
    icon("swap"),
    "Swap",
  );
  return h(
    "fieldset",
    { class: "field" },
    h("legend", {}, "Frames"),
    h("div", { class: "slots" }, slot("first", "First frame"), slot("last", "Last frame")),
    h("div", { class: "between" }, mediaNote(problems), swap),
  );
}

function frameCard(item, title, words, problem, remove) {
  return h(
    "div",
    { class: "frame" },
    item.kind === "image" ? h("img", { src: item.url, alt: `${title}: ${item.file.name}` }) : h("div", { class: "blank" }),
    removeButton(item, remove),
    h("p", { class: problem ? "note bad" : "note", id: item.id }, problem ?? words),
  );
}

/** What becomes of a frame: the first is stretched onto the canvas, the second covers it and is cropped. */
function fitted(item, form, canvas) {
  if (!item.width || !canvas) return "The server will measure it.";
  const same = Math.abs(item.width / item.height - canvas.width / canvas.height) < 1e-9;
  const leads = item === (form.first ?? form.last);
  const how = same ? "" : leads ? ", stretched" : ", cropped";
  return `${item.width} × ${item.height} → ${canvas.width} × ${canvas.height}${how}`;
}

function references(form, limits, problems, act) {
  const names = labels(form.references);
  const cards = form.references.map((item, place) => card(item, place, names[place], form, limits, problems, act));
  return h(
    "fieldset",
    { class: "field" },
    h("legend", {}, "References"),
    h("p", { class: "note" }, "In this order. Name them in the prompt by their labels."),
    cards.length ? h("ol", { class: "cards", id: "reference-list" }, cards) : null,
    drop("drop-references", "Add references: choose or drop files", "Drop pictures, videos, sounds, or choose them", ACCEPT.any, null, act),
    mediaNote(problems),
  );
}

function card(item, place, names, form, limits, problems, act) {
  const last = form.references.length - 1;
  const problem = problems[item.id];
  const element = h(
    "li",
    { class: "card", draggable: "true", "data-place": place },
    preview(item),
    h(
      "div",
      { class: "card-text" },
      h("p", { class: "chips" }, names.map((name) => chip(name, act))),
      h("p", { class: "file" }, `${item.file.name} · ${bytes(item.file.size)}`),
      h("p", { class: problem ? "note bad" : "note", id: item.id }, problem ?? reads(item, form, limits)),
      options(item, act),
    ),
    h(
      "div",
      { class: "card-tools" },
      moveButton(item, "up", place === 0, () => act.move(place, place - 1)),
      moveButton(item, "down", place === last, () => act.move(place, place + 1)),
      removeButton(item, () => act.remove(item)),
    ),
  );
  draggable(element, place, act);
  return element;
}

function chip(name, act) {
  const props = { type: "button", class: "chip", title: `Put <${name}> into the prompt`, on: { click: () => act.insert(`<${name}>`) } };
  return h("button", props, name);
}

/** What the model reads of a reference, in words. */
function reads(item, form, limits) {
  const what = used(item, form.frames, limits);
  if (!what) return "The server will measure it.";
  const size = what.width ? `${item.width} × ${item.height} → ${what.width} × ${what.height}` : null;
  const whole = item.seconds ? seconds(item.seconds) : null;
  const read = what.seconds === null ? null : seconds(what.seconds);
  const part = read === whole ? read : `${read} of ${whole}`;
  return [size, part, what.frames ? `${what.frames} frames` : null].filter(Boolean).join(" · ");
}

function preview(item) {
  if (item.kind === "image") return h("img", { class: "thumb", src: item.url, alt: "" });
  if (item.kind === "video") {
    return h("video", { class: "thumb", src: `${item.url}#t=0.1`, muted: true, preload: "metadata", tabindex: "-1", "aria-hidden": "true" });
  }
  return h("div", { class: "thumb sound" }, icon(item.kind ? "sound" : "file"));
}

function options(item, act) {
  if (item.kind !== "video" && item.kind !== "audio") return null;
  const start = h("input", {
    id: `${item.id}-start`,
    type: "number",
    min: "0",
    step: "0.1",
    value: String(item.start),
    on: { change: () => act.edit(item, { start: Math.max(0, Number(start.value) || 0) }) },
  });
  const player = h(item.kind, { class: "mini", src: item.url, controls: true, preload: "none", "aria-label": `Play ${item.file.name}` });
  const sound = h("input", {
    id: `${item.id}-sound`,
    type: "checkbox",
    checked: item.useAudio,
    on: { change: () => act.edit(item, { useAudio: sound.checked }) },
  });
  return h(
    "div",
    { class: "options" },
    item.kind === "audio" ? player : null,
    h("label", { class: "inline" }, "From second ", start),
    item.kind === "video" && item.hasAudio ? h("label", { class: "inline" }, sound, " with its sound") : null,
  );
}

function moveButton(item, way, disabled, move) {
  const id = `${item.id}-${way}`;
  const label = `Move ${item.file.name} ${way}`;
  const click = () => {
    move();
    const other = byId(`${item.id}-${way === "up" ? "down" : "up"}`);
    if (byId(id)?.disabled) other?.focus();
    else byId(id)?.focus();
  };
  return h("button", { type: "button", id, class: "plain square", disabled, "aria-label": label, title: label, on: { click } }, icon(way));
}

function removeButton(item, remove) {
  const label = `Remove ${item.file.name}`;
  const click = () => {
    remove();
    announce(`${item.file.name} removed`);
    byId("media").querySelector("input, button")?.focus();
  };
  return h("button", { type: "button", class: "plain square remove", "aria-label": label, title: label, on: { click } }, icon("close"));
}

const mediaNote = (problems) => h("p", { class: problems.media ? "note bad" : "note", id: "media-note" }, problems.media ?? "");

function drop(id, label, words, accept, place, act) {
  const input = h("input", {
    type: "file",
    id,
    accept,
    multiple: accept === ACCEPT.any,
    class: "hidden",
    "aria-label": label,
    "aria-describedby": "media-note",
    on: { change: () => act.add([...input.files], place) },
  });
  const zone = h("label", { class: "drop" }, input, icon(accept === ACCEPT.any ? "plus" : "image"), h("span", {}, words));
  takesFiles(zone, (files) => act.add(files, place));
  return zone;
}

/** Let files be dropped on an element. */
export function takesFiles(element, take) {
  const over = (on) => element.classList.toggle("over", on);
  element.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    over(true);
  });
  element.addEventListener("dragleave", () => over(false));
  element.addEventListener("drop", (event) => {
    over(false);
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    event.stopPropagation();
    take([...event.dataTransfer.files]);
  });
}

/** Let a card be dragged to another one's place. */
function draggable(element, place, act) {
  element.addEventListener("dragstart", (event) => {
    event.dataTransfer.setData(DRAGGED, String(place));
    event.dataTransfer.effectAllowed = "move";
  });
  element.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes(DRAGGED)) return;
    event.preventDefault();
    element.classList.add("over");
  });
  element.addEventListener("dragleave", () => element.classList.remove("over"));
  element.addEventListener("drop", (event) => {
    const from = event.dataTransfer.getData(DRAGGED);
    if (from === "") return;
    event.preventDefault();
    event.stopPropagation();
    act.move(Number(from), place);
  });
}
