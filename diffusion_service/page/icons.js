// Small line drawings, as path data on a grid of 20.

const PATHS = {
  up: "M10 15V5m-4 4 4-4 4 4",
  down: "M10 5v10m-4-4 4 4 4-4",
  close: "m5.5 5.5 9 9m0-9-9 9",
  swap: "M4 7h11m-3-3 3 3-3 3M16 13H5m3-3-3 3 3 3",
  plus: "M10 4v12M4 10h12",
  image: "M3.5 5.5a2 2 0 0 1 2-2h9a2 2 0 0 1 2 2v9a2 2 0 0 1-2 2h-9a2 2 0 0 1-2-2zM4 13l3.5-3.5 3 3 2-2 3.5 3.5M12.8 7.3h.01",
  sound: "M4 8v4m3-7v10m3-8v6m3-8v10m3-7v4",
  download: "M10 3.5v9m-3.5-3.5 3.5 3.5 3.5-3.5M4 16.5h12",
  again: "M15.5 8A6 6 0 1 0 16 11.5M15.7 4v4h-4",
  copy: "M7.5 7.5h8v9h-8zM4.5 12.5v-9h8",
  trash: "M4 6h12m-7.5-2.5h3M6 6l.7 10h6.6L14 6",
  edit: "m4 16 .8-3.5L13 4.3l2.7 2.7-8.2 8.2z",
  key: "M12.5 10a3.5 3.5 0 1 0-3.4-2.7L3.5 12.9V16h3v-2h2v-2l1.6-1.3a3.5 3.5 0 0 0 2.4-.7zM13 6.5h.01",
  system: "M3 4.5h14v9H3zM7.5 16.5h5",
  light: "M10 7a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM10 2.5v1.5m0 12v1.5M2.5 10H4m12 0h1.5M4.7 4.7l1 1m8.6 8.6 1 1m0-10.6-1 1m-8.6 8.6-1 1",
  dark: "M16 11.5A6.5 6.5 0 0 1 8.5 4 6.5 6.5 0 1 0 16 11.5z",
  file: "M5.5 3.5h6l3 3v10h-9zM11.5 3.5v3h3",
  dice: "M4 4h12v12H4zM7.5 7.5h.01m4.99 0h.01m-5.01 5h.01m4.99 0h.01",
};

/** An icon; decoration only, its button has the words. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const path = document.createElementNS(space, "path");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
