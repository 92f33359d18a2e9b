// Building and updating elements. Nothing here replaces an element that can be updated.

/**
 * Returns a new element. `props` are attributes, except `text`, `value`, and functions, which listen
 * to the event of their name.
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "text") element.textContent = value;
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Returns a new SVG element with these attributes. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  setAttributes(element, attributes);
  element.append(...children);
  return element;
}

/** Sets attributes that differ from what they are. */
export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const text = String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Sets the text of an element if it differs: an equal text would still repaint. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/**
 * Makes the children of `parent` those of `items`, in their order, and keeps elements that exist.
 * `create(item)` returns an object with `element` and `update(item)`.
 */
export class KeyedList {
  #parent;
  #key;
  #create;
  #parts = new Map();

  constructor(parent, key, create) {
    this.#parent = parent;
    this.#key = key;
    this.#create = create;
  }

  get parts() {
    return [...this.#parts.values()];
  }

  update(items) {
    const left = new Map(this.#parts);
    let place = this.#parent.firstElementChild;
    for (const item of items) {
      const key = this.#key(item);
      let part = this.#parts.get(key);
      if (!part) {
        part = this.#create(item);
        this.#parts.set(key, part);
      }
      left.delete(key);
      part.update(item);
      if (part.element === place) place = place.nextElementSibling;
      else this.#parent.insertBefore(part.element, place);
    }
    for (const [key, part] of left) {
      part.element.remove();
      part.close?.();
      this.#parts.delete(key);
    }
  }
}

/** Says something to screen readers, without moving the focus. */
export function announce(text) {
  setText(document.getElementById("announcer"), text);
}

const TOAST_MS = 7000;
let toastTimer = null;

/** Shows a sentence for some seconds, and says it to screen readers. */
export function notify(text) {
  const toast = document.getElementById("toast");
  setText(toast, text);
  toast.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (toast.hidden = true), TOAST_MS);
}

/** Opens a modal dialog and resolves with the value of the button that closed it, "" for none. */
export function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}
