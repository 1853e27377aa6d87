// The rules of a request as the server has them, from the server's own limits. Pure: numbers in, numbers and words out.

export const FPS = 24;

/** To the nearest whole number, half to even, as the server rounds. */
export function roundEven(value) {
  const below = Math.floor(value);
  const rest = value - below;
  if (rest !== 0.5) return Math.round(value);
  return below % 2 === 0 ? below : below + 1;
}

const toMultiple = (side, multiple) => Math.max(multiple, roundEven(side / multiple) * multiple);

/** The canvas of a ratio: short edge first, area capped, both sides to the nearest multiple. Null past the widest. */
export function canvasForRatio(width, height, size) {
  const ratio = width / height;
  if (!(ratio >= 1 / size.max_aspect && ratio <= size.max_aspect)) return null;
  const edge = size.short_edge_px;
  let [wide, high] = ratio >= 1 ? [edge * ratio, edge] : [edge, edge / ratio];
  if (wide * high > size.max_pixels) {
    const scale = Math.sqrt(size.max_pixels / (wide * high));
    wide *= scale;
    high *= scale;
  }
  return { width: toMultiple(wide, size.multiple_px), height: toMultiple(high, size.multiple_px) };
}

/** Whether some ratio resolves to this canvas; the rule is constant over an interval of ratios, so three decide. */
function ruleYields(width, height, size) {
  const half = size.multiple_px / 2;
  const area = size.max_pixels;
  const low = Math.max((width - half) ** 2 / area, area / (height + half) ** 2, 1 / size.max_aspect);
  const high = Math.min((width + half) ** 2 / area, area / (height - half) ** 2, size.max_aspect);
  const own = Math.min(Math.max(width / height, 1 / size.max_aspect), size.max_aspect);
  const ratios = low <= high ? [low, (low + high) / 2, high, own] : [own];
  return ratios.some((ratio) => {
    const canvas = canvasForRatio(ratio, 1, size);
    return canvas !== null && canvas.width === width && canvas.height === height;
  });
}

/** What is wrong with an explicit size, in words; null where nothing is. */
export function sizeProblem(width, height, size) {
  const multiple = size.multiple_px;
  const whole = (side) => Number.isInteger(side) && side > 0 && side % multiple === 0;
  if (!whole(width) || !whole(height)) return `Width and height are multiples of ${multiple}.`;
  const ratio = width / height;
  const inShape = ratio >= 1 / size.max_aspect && ratio <= size.max_aspect;
  if ((inShape && width * height <= size.max_pixels) || ruleYields(width, height, size)) return null;
  if (!inShape) return `A picture is between 1:${size.max_aspect} and ${size.max_aspect}:1.`;
  return `A picture has at most ${count(size.max_pixels)} pixels, this one ${count(width * height)}.`;
}

/** The size at which the model reads a reference image. */
export function imageSize(width, height, limits) {
  const scale = limits.references.image_short_edge_px / Math.min(width, height);
  const multiple = limits.size.multiple_px;
  return { width: toMultiple(width * scale, multiple), height: toMultiple(height * scale, multiple) };
}

/** What the model reads of one reference, for a clip of `frames`; null where nothing is known yet. */
export function used(item, frames, limits) {
  if (item.kind === "image") {
    return item.width ? { ...imageSize(item.width, item.height, limits), frames: null, seconds: null } : null;
  }
  if (!item.seconds) return null;
  const seconds = Math.min(Math.max(item.seconds - item.start, 0), frames / FPS);
  if (item.kind === "audio") return { width: null, height: null, frames: null, seconds };
  const canvas = item.width ? canvasForRatio(item.width, item.height, limits.size) : null;
  const read = Math.min(Math.floor((item.seconds - item.start) * FPS + 0.5), frames);
  return { width: canvas?.width ?? null, height: canvas?.height ?? null, frames: read, seconds: read / FPS };
}

/** What is wrong with one file, in words. `role` is keyframe or reference. */
export function fileProblems(item, role, limits) {
  if (item.problem) return [item.problem];
  const rules = limits.references;
  if (role === "keyframe" && item.kind !== "image") return ["A frame is a picture."];
  const found = [];
  const cap = limits.bytes[`max_${item.kind}`];
  if (item.file.size > cap) found.push(`${item.file.name} has ${bytes(item.file.size)}; at most ${bytes(cap)} are read.`);
  if (item.width) found.push(...pictureProblems(item, role, limits));
  if (item.seconds && role === "reference") {
    const length = item.seconds - item.start;
    const slack = rules.tolerance_seconds + 0.05;
    if (length < rules.min_seconds - 0.05 || length > rules.max_seconds + slack) {
      found.push(`It lasts ${seconds(length)}; ${rules.min_seconds} to ${rules.max_seconds} s are read.`);
    }
  }
  return found;
}

function pictureProblems({ width, height, kind }, role, limits) {
  const rules = limits.references;
  const found = [];
  const [least, most] = [rules.min_side_px, rules.max_side_px];
  if (Math.min(width, height) < least || Math.max(width, height) > most) {
    found.push(`Sides are ${round(least)} to ${most} px; this one has ${width} × ${height}.`);
  }
  const widest = role === "keyframe" ? rules.max_keyframe_aspect : rules.max_aspect;
  const ratio = width / height;
  if (ratio > widest || ratio < 1 / widest) {
    found.push(`Width by height is ${round(1 / widest)} to ${widest}; here it is ${round(ratio)}.`);
  }
  if (kind === "image" && width * height > limits.max_image_pixels) {
    found.push(`A picture has at most ${count(limits.max_image_pixels)} pixels.`);
  }
  return found;
}

/** What is wrong with the references together, in words. */
export function togetherProblems(items, limits) {
  const rules = limits.references;
  const of = (kind) => items.filter((item) => item.kind === kind);
  const found = [];
  if (!of("image").length && !of("video").length) found.push("Add at least one picture or video.");
  for (const kind of ["image", "video", "audio"]) {
    const most = rules[`max_${kind}s`];
    if (of(kind).length > most) found.push(`At most ${most} ${PLURAL[kind]}; here are ${of(kind).length}.`);
  }
  if (items.length > rules.max_total) found.push(`At most ${rules.max_total} references together.`);
  for (const kind of ["video", "audio"]) {
    const length = of(kind).reduce((sum, item) => sum + Math.max((item.seconds ?? 0) - item.start, 0), 0);
    if (length > rules.max_seconds + of(kind).length * rules.tolerance_seconds + 0.05) {
      found.push(`The ${PLURAL[kind]} last at most ${rules.max_seconds} s together, not ${seconds(length)}.`);
    }
  }
  return found;
}

export const PLURAL = { image: "pictures", video: "videos", audio: "sounds" };

/** The names under which a prompt speaks of each reference, in request order. A video's own sound comes first. */
export function labels(items) {
  const counts = { image: 0, video: 0, audio: 0 };
  const name = (kind) => `${{ image: "Picture", video: "Video", audio: "Audio" }[kind]} ${(counts[kind] += 1)}`;
  return items.map((item) => {
    const sound = item.kind === "video" && item.hasAudio && item.useAudio ? [name("audio")] : [];
    return item.kind ? [name(item.kind), ...sound] : [];
  });
}

export const round = (value) => String(Math.round(value * 100) / 100);
export const count = (value) => value.toLocaleString("en-US");
export const seconds = (value) => `${round(value)} s`;

/** Bytes for people. */
export function bytes(value) {
  if (value < 1024) return `${value} B`;
  const unit = value < 2 ** 20 ? ["KiB", 1024] : ["MiB", 2 ** 20];
  return `${(value / unit[1]).toFixed(value / unit[1] < 10 ? 1 : 0)} ${unit[0]}`;
}
