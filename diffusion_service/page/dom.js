// Building the page: elements from plain calls, never from markup.

/** An element. `props`: attributes, `on` for listeners, `class`; null and false are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value" || name === "muted") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Replace what `element` holds, and keep the focus where it was, by id. */
export function fill(element, ...children) {
  const focused = document.activeElement?.id;
  const within = focused && element.contains(document.activeElement);
  element.replaceChildren(...children.flat(3).filter(Boolean));
  if (within) byId(focused)?.focus();
}

/** Say something to screen readers. */
export function announce(words) {
  byId("announce").textContent = words;
}

/** Attach a message to a control, so that it is read with it. */
export function mark(control, note, problem, words = "") {
  note.textContent = problem ?? words;
  note.classList.toggle("bad", Boolean(problem));
  if (problem) control.setAttribute("aria-invalid", "true");
  else control.removeAttribute("aria-invalid");
}
