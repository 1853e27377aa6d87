// A job on its way: its phases, the step it is at, and how long it still takes.

import { fill, h } from "./dom.js";

export const PHASES = ["encoding", "transferring", "denoising", "decoding", "muxing"];
const NAMES = {
  queued: "Waiting",
  encoding: "Encoding",
  transferring: "Handing over",
  denoising: "Denoising",
  decoding: "Decoding",
  muxing: "Writing",
};

export const unfinished = (video) => video.status === "queued" || video.status === "in_progress";

/** Where a job is, in a few words. */
export function stateText(video) {
  if (video.status === "queued" && (video.phase ?? "queued") === "queued") {
    return video.queue_position ? `Waiting, number ${video.queue_position} in line` : "Waiting";
  }
  if (unfinished(video)) return `${NAMES[video.phase] ?? "Working"}${stepText(video)}`;
  return { completed: "Ready", failed: "Failed", cancelled: "Cancelled" }[video.status];
}

function stepText(video) {
  if (video.phase !== "denoising" || video.step === null || video.step === undefined) return "";
  return `, step ${Math.min(video.step + 1, video.forwards)} of ${video.forwards}`;
}

/** Seconds for people. */
export function timeText(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The live view of one job. `tell` says words to screen readers when the phase changes. */
export class Progress {
  constructor(element, tell) {
    Object.assign(this, { element, tell, said: "", due: null });
    this.bar = h("progress", { max: 100, value: 0, "aria-label": "Progress" });
    this.percent = h("output", { class: "percent" });
    this.state = h("p", { class: "state" });
    this.left = h("p", { class: "left" });
    this.rail = h("ol", { class: "rail", "aria-label": "Phases" });
    fill(
      element,
      h("div", { class: "between" }, h("div", {}, this.state, this.left), this.percent),
      this.bar,
      this.rail,
    );
    this.clock = setInterval(() => this.tick(), 1000);
  }

  show(video) {
    this.bar.value = video.progress;
    this.percent.textContent = `${video.progress} %`;
    this.state.textContent = stateText(video);
    this.due = typeof video.eta_seconds === "number" ? Date.now() + 1000 * video.eta_seconds : null;
    this.tick();
    const here = PHASES.indexOf(video.phase);
    fill(this.rail, PHASES.map((phase, place) => h("li", this.mark(place, here), NAMES[phase])));
    const name = NAMES[video.phase] ?? "";
    if (name && name !== this.said) this.tell(`${name}, ${video.progress} percent`);
    this.said = name;
  }

  mark(place, here) {
    if (place === here) return { class: "here", "aria-current": "step" };
    return { class: place < here ? "done" : null };
  }

  tick() {
    const left = this.due === null ? null : (this.due - Date.now()) / 1000;
    this.left.textContent = left === null ? "Time left: not known yet" : left > 0.5 ? `About ${timeText(left)} left` : "Nearly there";
  }

  close() {
    clearInterval(this.clock);
  }
}
