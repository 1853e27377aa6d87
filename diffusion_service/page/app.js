// Puts the page together: server, form, stage, lists, and the address that names the clip on the stage.

import { Api } from "./api.js";
import { Stage } from "./clip.js";
import { Composer } from "./compose.js";
import { announce, byId, fill, h } from "./dom.js";
import { Lists } from "./history.js";
import { icon } from "./icons.js";
import { drawSeed, formOf, mediaOf } from "./request.js";
import { unfinished } from "./progress.js";

const HEALTH_MS = 10000;
const forms = new Map(); // by job: what this tab sent, files included

const api = new Api(() => askKey(true));
const stage = new Stage(api, {
  cancel,
  remove,
  again,
  reuse,
  changed: () => lists.refresh(),
});
const lists = new Lists(api, { open, cancel });
let composer = null;
let left = false; // the user did not want to give a key: asked for again only where one is acted on

async function start() {
  let limits;
  try {
    limits = await api.limits();
  } catch (error) {
    if (error.status === 401) byId("summary").textContent = "This server wants an API key.";
    else setTimeout(start, 3000);
    return;
  }
  composer ??= new Composer(api, limits, made);
  await lists.refresh();
  const named = location.hash.slice(1);
  const running = lists.videos.find(unfinished);
  const id = /^video_[0-9a-f]{32}$/.test(named) ? named : running?.id;
  if (id) open(id);
  else stage.empty();
}

/** A job was accepted. */
function made(video, form) {
  forms.set(video.id, form);
  open(video.id);
  lists.refresh();
  byId("stage").scrollIntoView({ block: "nearest" });
}

function open(id) {
  history.replaceState(null, "", `#${id}`);
  lists.choose(id);
  if (stage.id !== id || !stage.following) stage.show(id);
  if (innerWidth < 960) byId("stage").scrollIntoView({ block: "start" });
}

async function cancel(video) {
  try {
    await api.cancel(video.id);
    announce("Clip cancelled");
  } catch (error) {
    announce(error.message);
  }
  if (stage.id === video.id) await stage.refresh();
  await lists.refresh();
}

async function remove(video) {
  if (!confirm("Delete this clip for good?")) return;
  try {
    await api.remove(video.id);
  } catch (error) {
    if (error.status !== 404) return announce(error.message);
  }
  forms.delete(video.id);
  lists.forget(video.id);
  history.replaceState(null, "", location.pathname);
  stage.empty();
  byId("stage").focus();
}

/** The same request with another seed. Files that this tab does not have any more have to be added again. */
async function again(video, seed = drawSeed()) {
  const form = forms.get(video.id) ?? (video.references.length ? null : formOf(video, composer.limits));
  if (!form || (video.task !== "t2va" && !mediaOf(form).length)) return reuse(video, seed);
  await composer.send({ ...form, seed });
}

function reuse(video, seed = String(video.seed)) {
  composer.use({ ...(forms.get(video.id) ?? formOf(video, composer.limits)), seed });
  byId("composer").scrollIntoView({ block: "start" });
}

/** Ask for a key; `refused` where the server wanted another one than it got. */
function askKey(refused = false) {
  const dialog = byId("key-dialog");
  if (dialog.open || (refused && left)) return;
  byId("key").value = api.key;
  byId("key-note").textContent = refused && api.key
    ? "The server did not take this key."
    : "Some servers want one. It stays in this tab until you close it.";
  dialog.returnValue = "";
  dialog.showModal();
}

byId("key-dialog").addEventListener("close", (event) => {
  left = event.target.returnValue !== "use";
  if (left) return;
  api.useKey(byId("key").value.trim());
  start();
});
fill(byId("key-button"), icon("key"), h("span", { class: "words" }, "API key"));
byId("key-button").addEventListener("click", () => askKey());
byId("submit").addEventListener("click", () => (left = false), { capture: true });

const THEMES = ["system", "light", "dark"];
function useTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `Theme: ${theme}`);
  fill(byId("theme"), icon(theme), h("span", { class: "words" }, theme[0].toUpperCase() + theme.slice(1)));
  localStorage.setItem("h3-theme", theme);
}
byId("theme").addEventListener("click", () => {
  useTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length]);
});
useTheme(THEMES.find((theme) => theme === localStorage.getItem("h3-theme")) ?? "system");

async function watchServer() {
  const { ready, reason } = await api.health();
  const server = byId("server");
  const words = ready ? "Ready" : `Not ready: ${reason ?? "no reason given"}`;
  if (server.title !== words) server.title = byId("server-text").textContent = words;
  server.dataset.state = ready ? "ready" : "away";
  setTimeout(watchServer, HEALTH_MS);
}

addEventListener("hashchange", () => {
  const named = location.hash.slice(1);
  if (/^video_[0-9a-f]{32}$/.test(named) && named !== stage.id) open(named);
});
// What this page does not take is no page to go to.
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());

watchServer();
start();
