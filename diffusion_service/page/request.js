// What the form holds, what is wrong with it, and the body it becomes. No elements here.

import { FPS, canvasForRatio, fileProblems, round, sizeProblem, togetherProblems } from "./rules.js";
import { dataUrl } from "./media.js";

/** A form as it begins on this server. */
export function emptyForm(limits) {
  return {
    task: limits.tasks.includes("t2va") ? "t2va" : limits.tasks[0],
    prompt: "",
    shape: "16:9",
    width: "",
    height: "",
    frames: limits.length.default_num_frames,
    first: null,
    last: null,
    references: [],
    steps: "",
    seed: "",
    outputs: "",
    flowShift: "",
    audioFlowShift: "",
    quality: "",
  };
}

/** The media that go with the request, in its order. */
export function mediaOf(form) {
  if (form.task === "fl2va") return [form.first, form.last].filter(Boolean);
  return form.task === "ref2va" ? form.references : [];
}

/** The size of the clip; null while it cannot be told, or is wrong. */
export function canvasOf(form, limits) {
  if (form.shape === "custom") {
    const [width, height] = [Number(form.width), Number(form.height)];
    return sizeProblem(width, height, limits.size) ? null : { width, height };
  }
  if (form.shape !== "picture") {
    const [width, height] = limits.size.by_aspect_ratio[form.shape].split("x").map(Number);
    return { width, height };
  }
  const from = form.first ?? form.last;
  return from?.width ? canvasForRatio(from.width, from.height, limits.size) : null;
}

/** Everything that is wrong, by place: a place is the id of a control. Files have theirs under their own ids. */
export function problemsOf(form, limits) {
  const found = {};
  if (!form.prompt.trim()) found.prompt = "Say what the clip shows and sounds like.";
  if (form.shape === "custom") {
    const wrong = sizeProblem(Number(form.width), Number(form.height), limits.size);
    if (wrong) found.width = wrong;
  }
  Object.assign(found, mediaProblems(form, limits));
  for (const [name, [least, most, whole]] of Object.entries(numbers(limits))) {
    const wrong = numberProblem(form[name], least, most, whole);
    if (wrong) found[name] = wrong;
  }
  if (form.seed !== "" && !isSeed(form.seed)) found.seed = "A whole number of at most 64 bits; −1 draws one.";
  return found;
}

/** Least, most, and whether whole, of every setting that is a number. */
export function numbers(limits) {
  const steps = limits.num_inference_steps;
  return {
    steps: [steps.min, steps.max, true],
    outputs: [1, limits.max_outputs, true],
    flowShift: [0, 100, false],
    audioFlowShift: [0, 100, false],
  };
}

function numberProblem(text, least, most, whole) {
  if (text === "") return null;
  const value = Number(text);
  const fits = Number.isFinite(value) && value <= most && (whole ? value >= least && Number.isInteger(value) : value > least);
  return fits ? null : `${whole ? `A whole number from ${least}` : "More than 0, up"} to ${most}.`;
}

function isSeed(text) {
  if (!/^-?\d{1,19}$/.test(text)) return false;
  const value = BigInt(text);
  return value >= -(2n ** 63n) && value < 2n ** 63n;
}

function mediaProblems(form, limits) {
  const found = {};
  const role = form.task === "fl2va" ? "keyframe" : "reference";
  for (const item of mediaOf(form)) {
    const wrong = fileProblems(item, role, limits);
    if (wrong.length) found[item.id] = wrong.join(" ");
  }
  if (form.task === "fl2va" && !form.first && !form.last) found.media = "Add a first frame, a last frame, or both.";
  if (form.task === "ref2va") {
    const wrong = togetherProblems(form.references, limits);
    if (wrong.length) found.media = wrong.join(" ");
  }
  return found;
}

/** The form as a multipart body, and which item each media parameter of the server's answers means. */
export async function bodyOf(form, limits) {
  const body = new FormData();
  const canvas = canvasOf(form, limits);
  const extra = { task: form.task };
  if (form.task === "fl2va") extra.frame_indices = [...(form.first ? [0] : []), ...(form.last ? [-1] : [])];
  const fields = {
    prompt: form.prompt,
    size: form.shape === "picture" ? "" : `${canvas.width}x${canvas.height}`,
    num_frames: form.frames,
    num_inference_steps: form.steps,
    seed: form.seed,
    num_outputs_per_prompt: form.outputs,
    flow_shift: form.flowShift,
    audio_flow_shift: form.audioFlowShift,
    quality: form.quality,
    extra_params: JSON.stringify(extra),
  };
  for (const [name, value] of Object.entries(fields)) if (value !== "") body.append(name, value);
  const sent = [];
  for (const item of mediaOf(form)) {
    const [field, value] = await part(item);
    sent.push({ field, item });
    if (value instanceof File) body.append(field, value, value.name);
    else body.append(field, value);
  }
  return { body, itemOf: (param) => itemOf(sent, param) };
}

async function part(item) {
  const plain = item.start === 0 && (item.kind !== "video" || item.useAudio);
  if (plain || item.kind === "image") return ["input_references", item.file];
  const said = { [`${item.kind}_url`]: await dataUrl(item.file) };
  if (item.kind === "video" && !item.useAudio) said.use_audio = false;
  if (item.start > 0) said.start_time_seconds = item.start;
  return [`${item.kind}_reference`, JSON.stringify(said)];
}

function itemOf(sent, param) {
  const match = /^(\w+?)(?:\[(\d+)\])?(?:\.|$)/.exec(param ?? "");
  if (!match) return null;
  return sent.filter(({ field }) => field === match[1])[Number(match[2] ?? 0)]?.item ?? null;
}

/** The form that makes a job again, as far as the job tells; its media are not among it. */
export function formOf(video, limits) {
  const ratios = Object.entries(limits.size.by_aspect_ratio);
  const shape = ratios.find(([, size]) => size === video.size)?.[0] ?? "custom";
  const [width, height] = video.size.split("x");
  return {
    ...emptyForm(limits),
    task: video.task,
    prompt: video.prompt ?? "",
    shape,
    width: shape === "custom" ? width : "",
    height: shape === "custom" ? height : "",
    frames: video.num_frames,
    steps: String(video.num_inference_steps),
    seed: String(video.seed),
    outputs: video.num_outputs > 1 ? String(video.num_outputs) : "",
    flowShift: String(video.flow_shift),
    audioFlowShift: String(video.audio_flow_shift),
    quality: video.quality === "lossless" ? "" : video.quality,
  };
}

/** A form of its own with the same content, so that edits of one leave the other as it is. */
export function copyOf(form, fresh = (item) => ({ ...item })) {
  const item = (each) => each && fresh(each);
  return { ...form, first: item(form.first), last: item(form.last), references: form.references.map(item) };
}

/** A name for one attempt, so that a repeat of it makes no second clip. */
export function token() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A seed at random, of 31 bits. */
export const drawSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0] >>> 1);

export const lengthText = (frames) => `${round(frames / FPS)} s · ${frames} frames`;
