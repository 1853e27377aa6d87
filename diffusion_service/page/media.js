// One file as the page knows it: what it is by its content, its size and length, and a preview. Nothing leaves the page.

const READ = "JPEG, PNG, WEBP and GIF pictures, MP4, MOV and WEBM videos, WAV, MP3, FLAC, OGG and M4A sounds";
const QUICKTIME = ["ftyp", "moov", "mdat", "wide", "free", "skip", "pnot"];
const HEIF = ["heic", "heix", "heim", "heis", "hevc", "mif1", "msf1", "avif", "avis"];
let made = 0;

const LOOKED_INTO = 256 * 2 ** 20; // bytes: a file is read whole for it, and larger ones are refused for their size

/** Read a file. `kind` is null where it is none that the server reads; `problem` then says so. */
export async function readMedia(file) {
  const item = {
    id: `media-${(made += 1)}`,
    file,
    kind: null,
    width: null,
    height: null,
    seconds: null,
    hasAudio: false,
    useAudio: true,
    start: 0,
    url: URL.createObjectURL(file),
    problem: null,
  };
  try {
    return { ...item, ...(await factsOf(file, item.url)) };
  } catch {
    return { ...item, problem: "The file cannot be read." }; // a folder, for example
  }
}

async function factsOf(file, url) {
  const head = new Uint8Array(await file.slice(0, 4096).arrayBuffer());
  const found = format(head);
  if (found.problem) return { problem: found.problem };
  if (found.kind === "image") return { kind: "image", ...(await pictureFacts(url)) };
  const facts = await clipFacts(url);
  const kind = found.kind ?? (facts.width || (await hasTrack(file, "vide")) ? "video" : "audio");
  if (kind === "audio") return { kind, seconds: facts.seconds };
  return { kind, ...facts, hasAudio: await hasTrack(file, "soun") };
}

/** The same file once more, with a preview of its own. */
export const renewed = (item) => ({ ...item, id: `media-${(made += 1)}`, url: URL.createObjectURL(item.file) });

/** Forget what the browser keeps of it. */
export function dropMedia(item) {
  URL.revokeObjectURL(item.url);
}

function format(head) {
  if (!head.length) return { problem: "The file is empty." };
  const text = (from, to) => String.fromCharCode(...head.slice(from, to));
  const begins = (...codes) => codes.every((code, place) => head[place] === code);
  if (text(4, 8) === "ftyp" && HEIF.includes(text(8, 12))) {
    return { problem: "HEIC and AVIF pictures are not read here. Send a JPEG or PNG." };
  }
  if (begins(0xff, 0xd8, 0xff) || begins(0x89, 0x50, 0x4e, 0x47)) return { kind: "image" };
  if (/^GIF8[79]a/.test(text(0, 6))) return { kind: "image" };
  if (["RIFF", "RF64"].includes(text(0, 4))) {
    const kind = { WAVE: "audio", WEBP: "image" }[text(8, 12)];
    if (kind) return { kind };
  }
  if (["fLaC", "OggS"].includes(text(0, 4)) || text(0, 3) === "ID3") return { kind: "audio" };
  if (QUICKTIME.includes(text(4, 8)) || begins(0x1a, 0x45, 0xdf, 0xa3)) return { kind: null };
  if (head[0] === 0xff && (head[1] & 0xe0) === 0xe0) return { kind: "audio" };
  return { problem: `This is none of what is read here: ${READ}.` };
}

async function pictureFacts(url) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
    return { width: image.naturalWidth, height: image.naturalHeight };
  } catch {
    return {};
  }
}

/** Size and length of a video or sound, as far as the browser can tell; the server measures again. */
function clipFacts(url) {
  return new Promise((resolve) => {
    const probe = document.createElement("video");
    const give = () => {
      const known = Number.isFinite(probe.duration) && probe.duration > 0;
      resolve({
        width: probe.videoWidth || null,
        height: probe.videoHeight || null,
        seconds: known ? probe.duration : null,
      });
      probe.removeAttribute("src");
    };
    probe.preload = "metadata";
    probe.addEventListener("loadedmetadata", give, { once: true });
    probe.addEventListener("error", give, { once: true });
    setTimeout(give, 5000);
    probe.src = url;
  });
}

/** Whether an MP4 has a track of this handler, `vide` or `soun`; of a WEBM, whether it names a codec of that kind. */
async function hasTrack(file, handler) {
  if (file.size > LOOKED_INTO) return true;
  const data = new Uint8Array(await file.arrayBuffer());
  if (data[0] === 0x1a && data[1] === 0x45) return find(data.subarray(0, 1 << 16), handler === "soun" ? "A_" : "V_");
  for (let at = 0; (at = indexOf(data, "hdlr", at)) >= 0; at += 4) {
    if (String.fromCharCode(...data.slice(at + 12, at + 16)) === handler) return true;
  }
  return false;
}

const find = (data, word) => indexOf(data, word, 0) >= 0;

function indexOf(data, word, from) {
  const codes = [...word].map((letter) => letter.charCodeAt(0));
  for (let at = data.indexOf(codes[0], from); at >= 0; at = data.indexOf(codes[0], at + 1)) {
    if (codes.every((code, place) => data[at + place] === code)) return at;
  }
  return -1;
}

/** The whole file as a `data:` address, for a reference that says more than the file itself. */
export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
