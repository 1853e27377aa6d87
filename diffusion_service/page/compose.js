// The form as a whole: holds what was entered, shows what is wrong with it while it is entered, and sends it.

import { announce, byId, fill, h, mark } from "./dom.js";
import { promptNote, renderLength, renderShapeNote, renderShapes } from "./fields.js";
import { dropMedia, readMedia, renewed } from "./media.js";
import { renderMedia, takesFiles } from "./references.js";
import { bodyOf, canvasOf, copyOf, emptyForm, lengthText, mediaOf, problemsOf, token } from "./request.js";
import { makeSettings, renderSettings } from "./settings.js";

const HINTS = {
  t2va: "A clip with sound from a description.",
  fl2va: "A clip that begins with a picture, ends with one, or both.",
  ref2va: "A clip that takes people, things, motion and voices from your files.",
};

export class Composer {
  /** `onMade` gets each new job and the form that it came from. */
  constructor(api, limits, onMade) {
    Object.assign(this, { api, limits, onMade, form: emptyForm(limits), tried: false, rejected: {}, busy: false, once: null });
    makeSettings(limits, (edit) => this.change(edit));
    this.listen();
    this.render();
    byId("submit").disabled = false;
  }

  listen() {
    for (const input of byId("tasks").querySelectorAll("input")) {
      input.disabled = !this.limits.tasks.includes(input.value);
      input.addEventListener("change", () => this.change({ task: input.value }));
    }
    byId("prompt").addEventListener("input", (event) => this.change({ prompt: event.target.value }));
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("composer").requestSubmit();
    });
    for (const side of ["width", "height"]) {
      byId(side).addEventListener("input", (event) => this.change({ [side]: event.target.value }));
    }
    const frames = this.limits.length.num_frames;
    byId("length").addEventListener("input", (event) => this.change({ frames: frames[event.target.value] }));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    takesFiles(document.body, (files) => this.add(files, null));
  }

  /** Take an edit over, and look at everything again. */
  change(edit) {
    Object.assign(this.form, edit);
    if (edit.task === "fl2va") this.form.shape = "picture";
    else if (edit.task && this.form.shape === "picture") this.form.shape = "16:9";
    this.rejected = {};
    this.once = null;
    fill(byId("problems"));
    this.render();
  }

  /** Show another form, with the media it needs or none. */
  use(form) {
    for (const item of [this.form.first, this.form.last, ...this.form.references]) if (item) dropMedia(item);
    this.form = copyOf(form, renewed);
    this.tried = false;
    this.change({});
    byId("prompt").value = form.prompt;
    byId("prompt").focus();
  }

  render() {
    const { form, limits } = this;
    const found = { ...problemsOf(form, limits), ...this.rejected };
    // What is merely not there yet is said once the form was sent.
    if (!this.tried) for (const place of ["prompt", "width"]) if (!form[place]) delete found[place];
    if (!this.tried && !mediaOf(form).length) delete found.media;
    for (const input of byId("tasks").querySelectorAll("input")) input.checked = input.value === form.task;
    byId("task-hint").textContent = HINTS[form.task];
    mark(byId("prompt"), byId("prompt-note"), found.prompt, promptNote(form, limits));
    renderMedia(form, limits, found, this.actions());
    renderShapes(form, limits, (edit) => this.change(edit));
    renderShapeNote(form, limits, found.width);
    renderLength(form, limits);
    renderSettings(form, limits, found);
    this.summarize();
  }

  summarize() {
    const { form, limits } = this;
    const canvas = canvasOf(form, limits);
    const passes = Number(form.steps || limits.num_inference_steps.default) - 1;
    const parts = [canvas ? `${canvas.width} × ${canvas.height}` : null, lengthText(form.frames), `${passes} passes`];
    byId("summary").textContent = parts.filter(Boolean).join(" · ");
    byId("submit").textContent = this.busy ? "Sending" : "Make clip";
    byId("submit").disabled = this.busy;
  }

  actions() {
    return {
      add: (files, place) => this.add(files, place),
      remove: (item) => this.remove(item),
      move: (from, to) => this.move(from, to),
      edit: (item, edit) => {
        Object.assign(item, edit);
        this.change({});
      },
      swap: () => this.change({ first: this.form.last, last: this.form.first }),
      insert: (words) => this.insert(words),
    };
  }

  /** Take files in: where they were dropped, else where they fit, which may be another task. */
  async add(files, place) {
    const items = await Promise.all(files.map(readMedia));
    const { form, limits } = this;
    if (form.task === "t2va" && items.length) {
      const pictures = items.length <= 2 && items.every((item) => item.kind === "image" || item.problem);
      const task = pictures && limits.tasks.includes("fl2va") ? "fl2va" : "ref2va";
      if (!limits.tasks.includes(task)) return announce("This server makes clips from words alone.");
      this.change({ task });
    }
    if (form.task === "fl2va") {
      for (const item of items) {
        const free = place ?? (form.first ? "last" : "first");
        if (form[free]) dropMedia(form[free]);
        form[free] = item;
        place = null;
      }
    } else {
      form.references.push(...items);
    }
    this.change({});
    announce(items.map((item) => `${item.file.name} added`).join(", "));
  }

  remove(item) {
    const { form } = this;
    for (const place of ["first", "last"]) if (form[place] === item) form[place] = null;
    form.references = form.references.filter((each) => each !== item);
    dropMedia(item);
    this.change({});
  }

  move(from, to) {
    const list = this.form.references;
    const [item] = list.splice(from, 1);
    list.splice(to, 0, item);
    this.change({});
    announce(`${item.file.name} is now number ${to + 1} of ${list.length}`);
  }

  insert(words) {
    const prompt = byId("prompt");
    prompt.setRangeText(words, prompt.selectionStart, prompt.selectionEnd, "end");
    this.change({ prompt: prompt.value });
    prompt.focus();
  }

  async submit() {
    this.tried = true;
    const places = Object.keys(problemsOf(this.form, this.limits));
    this.render();
    if (places.length) return this.point(places[0]);
    this.once ??= token(); // the same one while nothing is changed: sent again after a lost answer, it makes no second clip
    await this.send(this.form, this.once);
  }

  /** Send a form; what the server refuses is shown where it belongs. */
  async send(form, once = token()) {
    if (this.busy) return;
    this.busy = true;
    this.rejected = {};
    fill(byId("problems"));
    this.render();
    let itemOf = () => null;
    try {
      const sent = await bodyOf(form, this.limits); // which reads files: they may be gone by now
      itemOf = sent.itemOf;
      const video = await this.api.create(sent.body, once);
      this.once = null;
      this.onMade(video, copyOf(form));
      announce("Clip accepted");
    } catch (error) {
      this.refused(error, itemOf(error.param));
    } finally {
      this.busy = false;
      this.render();
    }
  }

  refused(error, item) {
    if (error.status) this.once = null;
    const place = item && mediaOf(this.form).includes(item) ? item.id : (PLACES[error.param] ?? null);
    if (place) this.rejected[place] = error.message;
    fill(byId("problems"), h("p", { class: "refusal" }, error.message));
    this.render();
    if (place) this.point(place);
  }

  point(place) {
    const target = byId(place === "media" ? byId("media").querySelector("input")?.id : place);
    target?.scrollIntoView({ block: "center" });
    if (target?.matches("input, textarea")) target.focus();
  }
}

const PLACES = {
  prompt: "prompt",
  size: "width",
  num_inference_steps: "steps",
  seed: "seed",
  num_outputs_per_prompt: "outputs",
  flow_shift: "flowShift",
  audio_flow_shift: "audioFlowShift",
  quality: "quality",
};
