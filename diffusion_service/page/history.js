// The queue and the history: who waits, what was made, page by page.

import { byId, fill, h } from "./dom.js";
import { icon } from "./icons.js";
import { stateText, timeText, unfinished } from "./progress.js";
import { round } from "./rules.js";

const PAGE = 12;
const BUSY_MS = 2000;
const IDLE_MS = 15000;
const MOST_PAGES_OF_QUEUE = 8;

/** Keeps both lists true while the page is seen. `acts`: open(id), cancel(video). */
export class Lists {
  constructor(api, acts) {
    Object.assign(this, { api, acts, videos: [], more: false, chosen: null, timer: null, posters: new Map() });
    byId("history-more").addEventListener("click", () => this.older());
    document.addEventListener("visibilitychange", () => document.hidden || this.refresh());
  }

  /** Ask for what is newest, and come again. Older clips that are open stay. */
  async refresh() {
    clearTimeout(this.timer);
    try {
      await this.take(await this.newest());
      this.draw();
    } catch {
      // The state of the server stands in the bar; the lists stay as they were.
    }
    const busy = this.videos.some(unfinished);
    if (!document.hidden) this.timer = setTimeout(() => this.refresh(), busy ? BUSY_MS : IDLE_MS);
  }

  /** The first page, and as many as the queue takes: those who wait are the newest. */
  async newest() {
    let page = await this.api.list(PAGE);
    const data = [...page.data];
    for (let read = 1; page.has_more && page.data.every(unfinished) && read < MOST_PAGES_OF_QUEUE; read += 1) {
      page = await this.api.list(PAGE, page.last_id);
      data.push(...page.data);
    }
    return { ...page, data };
  }

  /** Put the newest in front of the older ones that are known, where they meet. */
  async take(page) {
    const met = this.videos.findIndex((video) => video.id === page.last_id);
    if (met < 0) {
      Object.assign(this, { videos: page.data, more: page.has_more });
      return;
    }
    const older = this.videos.slice(met + 1);
    const now = await Promise.all(older.map((video) => (unfinished(video) ? this.asked(video) : video)));
    this.videos = [...page.data, ...now.filter(Boolean)];
    if (!older.length) this.more = page.has_more;
  }

  /** An older job as it is now: as it was where nobody says, and null where somebody has deleted it. */
  asked(video) {
    return this.api.video(video.id).catch((error) => (error.status === 404 ? null : video));
  }

  async older() {
    const more = byId("history-more");
    more.disabled = true;
    try {
      const page = await this.api.list(PAGE, this.videos.at(-1).id);
      this.videos.push(...page.data);
      this.more = page.has_more;
      this.draw();
      byId(`open-${page.data[0]?.id}`)?.focus();
    } catch (error) {
      byId("history-note").textContent = error.message;
    } finally {
      more.disabled = false;
    }
  }

  choose(id) {
    this.chosen = id;
    this.draw();
  }

  forget(id) {
    this.videos = this.videos.filter((video) => video.id !== id);
    this.draw();
  }

  draw() {
    const waiting = this.videos.filter(unfinished).reverse();
    const ended = this.videos.filter((video) => !unfinished(video));
    byId("queue").hidden = !waiting.length;
    fill(byId("queue-list"), waiting.map((video) => this.row(video)));
    fill(byId("history-list"), ended.map((video) => this.tile(video)));
    byId("history-note").textContent = ended.length ? "" : "Nothing was made yet.";
    byId("history-more").hidden = !this.more;
  }

  row(video) {
    const left = typeof video.eta_seconds === "number" ? ` · about ${timeText(video.eta_seconds)}` : "";
    const label = `Cancel: ${titleOf(video)}`;
    return h(
      "li",
      { class: video.id === this.chosen ? "chosen" : null },
      this.opener(
        video,
        h("span", { class: "title" }, titleOf(video)),
        h("span", { class: "note" }, `${stateText(video)}${left}`),
        h("progress", { max: 100, value: video.progress, "aria-label": "Progress" }),
      ),
      h(
        "button",
        { type: "button", class: "plain square", id: `cancel-${video.id}`, "aria-label": label, title: "Cancel", on: { click: () => this.acts.cancel(video) } },
        icon("close"),
      ),
    );
  }

  tile(video) {
    const facts = [video.size.replace("x", " × "), `${round(video.duration_s)} s`];
    return h(
      "li",
      { class: video.id === this.chosen ? "chosen" : null },
      this.opener(
        video,
        video.status === "completed" ? this.poster(video) : h("span", { class: "blank" }, stateText(video)),
        h("span", { class: "title" }, titleOf(video)),
        h("span", { class: "note" }, facts.join(" · ")),
      ),
    );
  }

  opener(video, ...children) {
    const current = video.id === this.chosen ? "true" : null;
    return h("button", { type: "button", class: "open", id: `open-${video.id}`, "aria-current": current, on: { click: () => this.acts.open(video.id) } }, children);
  }

  /** The first frame; made once, since lists are drawn often. */
  poster(video) {
    let image = this.posters.get(video.id);
    if (!image) {
      image = h("img", { alt: "", loading: "lazy", width: 160, height: 90 });
      this.posters.set(video.id, image);
      this.api.source(video.id, 0, "thumbnail").then(
        (url) => (image.src = url),
        () => null,
      );
    }
    return image;
  }
}

const titleOf = (video) => video.prompt?.trim() || "Without words";
