// The settings that most clips leave alone: steps, seed, number of clips, flow shifts, quality.

import { byId, fill, h, mark } from "./dom.js";
import { icon } from "./icons.js";
import { drawSeed } from "./request.js";

/** Make the controls once; `change` hears of every edit. */
export function makeSettings(limits, change) {
  const { defaults, num_inference_steps: steps } = limits;
  const number = (name, label, hint, ...more) => field(name, label, hint, change, "decimal", ...more);
  fill(
    byId("settings"),
    number("steps", "Steps", `${steps.default}`),
    field(
      "seed",
      "Seed",
      `${defaults.seed}`,
      change,
      "text",
      h(
        "button",
        {
          type: "button",
          class: "plain square",
          "aria-label": "Draw a seed",
          title: "Draw a seed",
          on: { click: () => change({ seed: drawSeed() }) },
        },
        icon("dice"),
      ),
    ),
    number("outputs", "Clips", "1"),
    number("flowShift", "Flow shift", `${defaults.flow_shift}`),
    number("audioFlowShift", "Audio flow shift", `${defaults.audio_flow_shift}`),
    quality(change),
  );
}

function quality(change) {
  const input = h("input", {
    id: "quality",
    type: "checkbox",
    "aria-describedby": "quality-note",
    on: { change: () => change({ quality: input.checked ? "high" : "" }) },
  });
  return h(
    "div",
    { class: "field" },
    h("span", { class: "inline" }, input, h("label", { for: "quality" }, "Skip passes that change little")),
    h("p", { class: "note", id: "quality-note" }, "Faster with many passes, and not lossless."),
  );
}

function field(name, label, placeholder, change, mode, ...more) {
  const input = h("input", {
    id: name,
    type: "text",
    inputmode: mode,
    autocomplete: "off",
    placeholder,
    "aria-describedby": `${name}-note`,
    on: { input: () => change({ [name]: input.value.trim() }) },
  });
  return h(
    "div",
    { class: "field" },
    h("label", { for: name }, label),
    h("div", { class: "with-button" }, input, more),
    h("p", { class: "note", id: `${name}-note` }),
  );
}

const NAMES = ["steps", "seed", "outputs", "flowShift", "audioFlowShift"];

export function renderSettings(form, limits, problems) {
  const steps = Number(form.steps || limits.num_inference_steps.default);
  const notes = { steps: problems.steps ? "" : `${steps - 1} passes through the model` };
  for (const name of NAMES) {
    const input = byId(name);
    if (input.value !== form[name]) input.value = form[name];
    mark(input, byId(`${name}-note`), problems[name], notes[name]);
  }
  byId("quality").checked = form.quality === "high";
  if (NAMES.some((name) => problems[name])) byId("more").open = true;
}
