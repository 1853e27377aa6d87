// One job on the stage: its progress, then the clip with everything that is known about it.

import { announce, byId, fill, h } from "./dom.js";
import { icon } from "./icons.js";
import { Progress, timeText, unfinished } from "./progress.js";
import { bytes, round } from "./rules.js";

const ASK_MS = 2000;
const TASKS = { t2va: "Words", fl2va: "First and last frame", ref2va: "References" };

/** Shows one job at a time. `acts`: cancel(video), remove(video), again(video), reuse(video), changed(video). */
export class Stage {
  constructor(api, acts) {
    Object.assign(this, { api, acts, id: null, video: null, following: null, progress: null, asked: 0, drawn: 0, told: 0, urls: [] });
    this.body = byId("stage-body");
  }

  /** Show a job and, until it ends, follow it. `following` is null where that failed: it may be shown again. */
  async show(id) {
    this.leave();
    this.id = id;
    this.following = new AbortController();
    let video;
    try {
      video = await this.api.video(id);
    } catch (error) {
      if (this.id !== id) return;
      this.following = null;
      fill(this.body, h("p", { class: "refusal" }, error.message));
      return;
    }
    if (this.id !== id) return;
    this.draw(video);
    if (!unfinished(video)) return;
    const { signal } = this.following;
    await this.api.follow(id, (event) => this.heard(event), signal);
    await this.toItsEnd(signal);
  }

  /** Events are over: ask until the job is over too, whatever becomes of a single answer. */
  async toItsEnd(signal) {
    while (!signal.aborted) {
      const error = await this.refresh();
      if (signal.aborted || !this.video || !unfinished(this.video)) return;
      if (error?.status === 401) {
        this.following = null;
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, ASK_MS));
    }
  }

  leave() {
    this.following?.abort();
    this.progress?.close();
    this.release();
    Object.assign(this, { id: null, video: null, following: null, progress: null, begun: false });
  }

  /** Give back what the browser keeps of a clip that was fetched with a key. */
  release(...urls) {
    for (const url of this.urls) URL.revokeObjectURL(url);
    this.urls = urls;
  }

  empty() {
    this.leave();
    fill(this.body, h("div", { class: "empty" }, h("div", { class: "wave" }, WAVE.map(bar)), h("p", {}, "Your clip will be here.")));
  }

  /** An event came: its own words at once, what it does not say (step, time left) by asking, not too often. */
  heard(event) {
    if (event.type === "video.deleted") return this.empty();
    if (!this.video || !event.status || !unfinished(event)) return;
    this.told += 1;
    const anew = this.begun && event.status === "queued";
    this.begun = event.status === "in_progress";
    if (anew || event.progress >= this.video.progress) {
      Object.assign(this.video, { status: event.status, phase: event.phase, progress: event.progress });
      if (event.phase !== "denoising") this.video.step = null;
      this.progress?.show(this.video);
    } // else it is the past, with which a stream begins
    const wait = Math.max(0, this.asked + 300 - Date.now());
    clearTimeout(this.later);
    this.later = setTimeout(() => this.refresh(), wait);
  }

  /** Ask for the job as it is now; the error, where there was no answer. */
  async refresh() {
    const id = this.id;
    if (!id) return null;
    const { told } = this;
    const asked = (this.asked = Date.now());
    try {
      const video = await this.api.video(id);
      if (this.id !== id || asked < this.drawn) return null;
      // What happened since may have been told by events.
      if (told !== this.told && unfinished(video) && video.progress < this.video.progress) return null;
      this.drawn = asked;
      this.draw(video);
      return null;
    } catch (error) {
      if (error.status === 404 && this.id === id) this.empty();
      return error;
    }
  }

  draw(video) {
    const before = this.video?.status;
    const focused = this.body.contains(document.activeElement);
    this.video = video;
    if (unfinished(video)) {
      if (!this.progress) this.drawProgress(video);
      this.progress.show(video);
      return;
    }
    if (before === video.status) return;
    this.progress?.close();
    this.progress = null;
    if (video.status === "completed") this.drawClip(video);
    else this.drawEnd(video);
    if (focused) byId("stage").focus(); // what had it is gone
    if (before) {
      announce(video.status === "completed" ? "The clip is ready" : `The clip ${video.status === "failed" ? "failed" : "was cancelled"}`);
      this.acts.changed(video);
    }
  }

  drawProgress(video) {
    const live = h("div", { class: "live" });
    this.progress = new Progress(live, announce);
    fill(
      this.body,
      h("div", { class: "working" }, h("div", { class: "wave moving" }, WAVE.map(bar))),
      live,
      h("p", { class: "said" }, video.prompt ?? ""),
      h("div", { class: "actions" }, button("Cancel", "close", () => this.acts.cancel(video), { id: "cancel" })),
    );
  }

  drawEnd(video) {
    const words = video.status === "failed" ? (video.error?.message ?? "The clip failed.") : "This clip was cancelled.";
    fill(
      this.body,
      h(
        "div",
        { class: "ended" },
        h("p", { class: video.status === "failed" ? "refusal" : "left" }, words),
        video.error?.code && video.status === "failed" ? h("p", { class: "note" }, `Code ${video.error.code}`) : null,
      ),
      h("p", { class: "said" }, video.prompt ?? ""),
      h(
        "div",
        { class: "actions" },
        button("Try again", "again", () => this.acts.again(video, String(video.seed)), { id: "retry" }),
        button("Edit as new", "edit", () => this.acts.reuse(video)),
        button("Delete", "trash", () => this.acts.remove(video), { class: "plain" }),
      ),
      facts(video),
    );
  }

  drawClip(video) {
    const [width, height] = video.size.split("x").map(Number);
    const player = h("video", {
      id: "player",
      controls: true,
      playsinline: true,
      preload: "metadata",
      width,
      height,
      "aria-label": `Clip: ${(video.prompt ?? "").slice(0, 120)}`,
    });
    player.style.setProperty("--ratio", `${width} / ${height}`);
    const trouble = h("p", { class: "note bad", hidden: true }, "This browser cannot play the clip here. The download has it.");
    player.addEventListener("error", () => (trouble.hidden = false));
    const name = (index) => (video.num_outputs > 1 ? `${video.id}-${index}.mp4` : video.file_name);
    const save = h("a", { class: "button primary", id: "download" }, icon("download"), "Download");
    let chosen = 0;
    const use = async (index) => {
      const mine = (chosen += 1);
      const ours = () => mine === chosen && this.id === video.id;
      try {
        const first = this.api.source(video.id, index, "thumbnail").catch(() => "");
        const [url, poster] = await Promise.all([this.api.source(video.id, index), first]);
        if (!ours()) return [url, poster].forEach((each) => URL.revokeObjectURL(each));
        this.release(url, poster);
        trouble.hidden = true;
        Object.assign(player, { poster, src: url });
        Object.assign(save, { href: url, download: name(index) });
      } catch (error) {
        if (!ours()) return;
        fill(trouble, error.message);
        trouble.hidden = false;
      }
    };
    use(0);
    fill(
      this.body,
      h("div", { class: "screen" }, player),
      trouble,
      video.outputs.length > 1 ? outputChoice(video, use) : null,
      h("p", { class: "said" }, video.prompt ?? ""),
      h(
        "div",
        { class: "actions" },
        save,
        button("Again with another seed", "again", () => this.acts.again(video), { id: "again" }),
        button("Edit as new", "edit", () => this.acts.reuse(video), { id: "reuse" }),
        button("Delete", "trash", () => this.acts.remove(video), { class: "plain", id: "delete" }),
      ),
      facts(video),
    );
  }
}

const WAVE = [3, 6, 9, 5, 12, 16, 10, 14, 20, 13, 8, 15, 11, 6, 9, 4, 7, 3];
const bar = (height) => h("i", { style: { "--height": height } });

function button(words, picture, click, props = {}) {
  return h("button", { type: "button", class: "secondary", ...props, on: { click } }, icon(picture), words);
}

function outputChoice(video, use) {
  const choices = video.outputs.map((output) =>
    h(
      "label",
      {},
      h("input", { type: "radio", name: "output", checked: output.index === 0, on: { change: () => use(output.index) } }),
      h("span", {}, `Seed ${output.seed}`),
    ),
  );
  return h("fieldset", { class: "tasks" }, h("legend", { class: "hidden" }, "Which clip"), choices);
}

/** Everything that is known about a job. */
function facts(video) {
  const plain = [
    ["Made from", TASKS[video.task]],
    ["Size", video.size.replace("x", " × ")],
    ["Length", `${round(video.duration_s)} s, ${video.num_frames} frames at ${video.fps} a second`],
    ["Seed", `${video.seed}`],
    ["Steps", `${video.num_inference_steps}, ${video.forwards} passes`],
    ["Flow shift", `${video.flow_shift}, sound ${video.audio_flow_shift}`],
    ["Quality", qualityText(video)],
    ["Model", video.model],
    video.lora ? ["LoRA", `${video.lora.name}, scale ${video.lora.scale}`] : null,
    ["Made", new Date(1000 * video.created_at).toLocaleString()],
    video.inference_time_s ? ["Took", timeText(video.inference_time_s)] : null,
    video.expires_at ? ["Kept until", new Date(1000 * video.expires_at).toLocaleDateString()] : null,
    video.outputs.length ? ["File", bytes(video.outputs.reduce((sum, each) => sum + each.bytes, 0))] : null,
    video.execution ? ["Ran on", ranOn(video.execution), "wide"] : null,
    ["Id", video.id, "wide"],
  ];
  const rows = plain.filter(Boolean).map(([name, value, width]) => h("div", { class: width }, h("dt", {}, name), h("dd", {}, value)));
  return h(
    "div",
    { class: "facts" },
    video.warnings.map((words) => h("p", { class: "note bad" }, words)),
    times(video.stage_durations),
    h("dl", {}, rows),
    video.references.length ? usedTable(video) : null,
    video.outputs.map((output) => digests(output, video.outputs.length > 1)),
  );
}

function qualityText({ quality, step_cache: cache, forwards, num_outputs: clips }) {
  const skipped = cache?.skipped_forwards;
  return Number.isInteger(skipped) ? `${quality}, ${skipped} of ${forwards * clips} passes skipped` : quality;
}

const ranOn = (run) =>
  `${run.device}, torch ${run.torch}, TP ${run.tp}, Ulysses ${run.ulysses}, ${run.precision}, ${run.attention}, ${run.load_format}`;

/** Where the time went, as one bar: the stages, without the parts that the encoder's has. */
function times(durations) {
  const parts = Object.entries(durations).filter(([name, value]) => value > 0 && !name.startsWith("encode_"));
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!parts.length) return null;
  const name = (key) => key.replaceAll("_", " ");
  return h(
    "figure",
    { class: "times" },
    h("div", { class: "spans", "aria-hidden": "true" }, parts.map(([, value], place) => h("i", { class: `span-${place % 7}`, style: { flex: `${value / whole}` } }))),
    h(
      "figcaption",
      {},
      h("ul", {}, parts.map(([key, value], place) => h("li", { class: `key-${place % 7}` }, `${name(key)} ${value < 10 ? round(value) : Math.round(value)} s`))),
    ),
  );
}

function usedTable(video) {
  const size = (width, height) => (width ? `${width} × ${height}` : "");
  const row = (each) =>
    h(
      "tr",
      {},
      h("td", {}, `${each.index + 1} ${{ image: "picture", video: "video", audio: "sound" }[each.kind]}`),
      h("td", {}, size(each.width, each.height)),
      h("td", {}, size(each.used_width, each.used_height)),
      h("td", {}, [each.frames ? `${each.frames} frames` : "", each.seconds ? `${round(each.seconds)} s` : ""].filter(Boolean).join(", ")),
    );
  const heads = ["Reference", "File", "Used at", "Used of it"].map((words) => h("th", { scope: "col" }, words));
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "References that were used" },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, video.references.map(row))),
  );
}

function digests(output, named) {
  return h(
    "div",
    { class: "digests" },
    named ? h("p", { class: "note" }, `Seed ${output.seed}`) : null,
    digest("Frames, SHA-256", output.frames_sha256),
    digest("Sound, SHA-256", output.audio_sha256),
  );
}

function digest(name, value) {
  const code = h("code", {}, value);
  const copy = async () => {
    getSelection().selectAllChildren(code); // where the page may not write to the clipboard, it is one key away
    await navigator.clipboard?.writeText(value);
    announce(`${name} ${navigator.clipboard ? "copied" : "selected"}`);
  };
  const props = { type: "button", class: "plain square", "aria-label": `Copy ${name}`, title: "Copy", on: { click: copy } };
  return h("div", { class: "digest" }, h("span", { class: "digest-name" }, name), code, h("button", props, icon("copy")));
}
