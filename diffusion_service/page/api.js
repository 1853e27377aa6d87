// Talking to the server of this page, with the user's key where one was typed in. Addresses are relative to the page.

const KEPT = "h3-key";

/** An error that the server explained, or a connection that failed (`status` 0). */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null }) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

/** The server's API. `onLocked` is called when it wants a key. */
export class Api {
  constructor(onLocked) {
    this.onLocked = onLocked;
    this.key = sessionStorage.getItem(KEPT) ?? "";
  }

  useKey(key) {
    this.key = key;
    if (key) sessionStorage.setItem(KEPT, key);
    else sessionStorage.removeItem(KEPT);
  }

  limits = () => this.json("v1/limits");
  models = () => this.json("v1/models");
  video = (id) => this.json(`v1/videos/${id}`);
  list = (limit, after) => this.json(`v1/videos?limit=${limit}${after ? `&after=${after}` : ""}`);
  cancel = (id) => this.json(`v1/videos/${id}/cancel`, { method: "POST" });
  remove = (id) => this.json(`v1/videos/${id}`, { method: "DELETE" });

  /** Create a job. `once` makes a repeat of the same call harmless. */
  create(body, once) {
    return this.json("v1/videos", { method: "POST", body, headers: { "Idempotency-Key": once } });
  }

  /** Always of this server: where clips lie in a store, a redirect there would be another origin, and the page's policy forbids that. */
  contentUrl(id, index, variant = "video") {
    return `v1/videos/${id}/content?redirect=false&variant=${variant}&index=${index}`;
  }

  /** An address that a picture or player can load: with a key the bytes are fetched first, since neither sends one. */
  async source(id, index, variant) {
    const url = this.contentUrl(id, index, variant);
    if (!this.key) return url;
    return URL.createObjectURL(await (await this.call(url)).blob());
  }

  async health() {
    try {
      const answer = await fetch("health");
      return { ready: answer.ok, ...(await answer.json()) };
    } catch {
      return { ready: false, reason: "the server does not answer" };
    }
  }

  async json(path, options) {
    return parse(await (await this.call(path, options)).text());
  }

  async call(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let answer;
    try {
      answer = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "The server does not answer." });
    }
    if (answer.ok) return answer;
    if (answer.status === 401) this.onLocked();
    throw new ApiError(answer.status, await reason(answer));
  }

  /** Follow a job's events until it ends: resumes where a dropped connection left off. */
  async follow(id, onEvent, signal) {
    let last = null;
    while (!signal.aborted) {
      try {
        const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
        const answer = await this.call(`v1/videos/${id}/events`, { headers, signal });
        if (answer.status === 204) return;
        for await (const event of events(answer.body)) {
          last = event.id ?? last;
          onEvent(event.data);
          if (!["video.queued", "video.in_progress"].includes(event.data.type)) return;
        }
      } catch (error) {
        if (signal.aborted || (error.status >= 400 && error.status < 500 && error.status !== 429)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

async function reason(answer) {
  const plain = { message: `The server answered ${answer.status}.` };
  try {
    return (await answer.json()).error ?? plain;
  } catch {
    return plain;
  }
}

/** JSON in which seeds past what a JavaScript number holds stay exact, as text. */
function parse(text) {
  return JSON.parse(text.replace(/"seed":(-?\d{16,})/g, '"seed":"$1"'));
}

/** The events of a stream: `{id, data}`; comments and other fields are passed over. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = block.split("\n").map((line) => line.split(/: ?(.*)/s));
      const data = fields.filter(([name]) => name === "data").map(([, text]) => text);
      const id = fields.find(([name]) => name === "id")?.[1] ?? null;
      if (data.length) yield { id, data: JSON.parse(data.join("\n")) };
    }
  }
}
