// Pictures that a person adds to a message: chosen, pasted or dropped, checked, shown, removed.

import { announce, h, notify, setText } from "./dom.js";
import { count, plural } from "./format.js";

const TYPES = { "image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WebP", "image/gif": "GIF" };
const NAMES = "PNG, JPEG, WebP or GIF";
// Room for the text of the conversation in a request's body.
const TEXT_BYTES = 64 * 1024;

const get = (id) => document.getElementById(id);

/** A picture as an element. Its description is the file's name. */
export function shownPicture({ url, name }) {
  return h("img", { src: url, alt: name, title: name });
}

/** A message of a person: plain text, or the pictures and then the text. */
export function userMessage(text, pictures) {
  if (!pictures.length) return { role: "user", content: text };
  const content = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (text) content.push({ type: "text", text });
  return { role: "user", content };
}

export class Pictures {
  #api;
  #limits = null;
  #model = "";
  #accepted = false;
  #list = get("pictures");
  #added = [];
  #sent;

  /** `sent()` returns the pictures of the conversation, which the next request has too. */
  constructor(api, sent) {
    this.#api = api;
    this.#sent = sent;
    const file = get("picture-file");
    file.accept = Object.keys(TYPES).join();
    get("add-picture").addEventListener("click", () => file.click());
    file.addEventListener("change", () => {
      this.#add(file.files);
      file.value = "";
    });
    get("message").addEventListener("paste", (event) => {
      const files = imagesIn(event.clipboardData);
      if (!files.length || !this.#accepted || event.clipboardData.getData("text/plain")) return;
      event.preventDefault();
      this.#add(files);
    });
    this.#takeDrops(get("view-chat"));
  }

  get added() {
    return this.#added;
  }

  /** Offers pictures if this model reads them. */
  async offer(model, reads) {
    this.#model = model;
    if (reads) this.#limits ??= await this.#api.json("/console/limits");
    if (model !== this.#model) return; // another model was chosen meanwhile
    this.#accepted = reads && this.#limits.images > 0;
    get("picture-part").hidden = !this.#accepted;
    if (!this.#accepted) return this.clear();
    const { images, image_bytes, image_pixels, body_bytes } = this.#limits;
    const total = inBody(body_bytes);
    const bytes = image_bytes < total ? `${mebibytes(image_bytes)} and ` : "";
    const limits = `up to ${images} and ${mebibytes(total)} in a chat, ${bytes}${count(image_pixels)} pixels each`;
    setText(get("picture-limits"), `${NAMES}, ${limits}. Paste and drop work too.`);
  }

  clear() {
    this.#added = [];
    this.#show();
    this.#refuse("");
  }

  #takeDrops(place) {
    const hasFiles = (event) => [...event.dataTransfer.types].includes("Files");
    const mark = (on) => place.classList.toggle("dropping", on);
    place.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault(); // or else the browser leaves the page for the file
      mark(this.#accepted);
    });
    place.addEventListener("dragleave", (event) => {
      if (!place.contains(event.relatedTarget)) mark(false);
    });
    place.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(false);
      if (this.#accepted) this.#add(event.dataTransfer.files);
      else notify(`${this.#model || "This model"} reads text only.`);
    });
  }

  async #add(files) {
    this.#refuse("");
    for (const file of [...files]) {
      try {
        this.#added.push(await this.#checked(file));
      } catch (error) {
        this.#refuse(`${nameOf(file)}: ${error.message}`);
        break;
      }
      announce(`${nameOf(file)} is added: ${plural(this.#added.length, "picture")} to send.`);
    }
    this.#show();
    get("message").focus();
  }

  /** Reads a file. Raises an error with what is wrong with it. */
  async #checked(file) {
    const { images, image_bytes, image_pixels, body_bytes } = this.#limits;
    const others = [...this.#sent(), ...this.#added];
    if (!(file.type in TYPES)) throw new Error(`it is no picture in ${NAMES}.`);
    if (file.size > image_bytes) throw new Error(`it has over ${mebibytes(image_bytes)}.`);
    if (others.length >= images) throw new Error(`a chat has at most ${plural(images, "picture")}; begin a new one.`);
    const picture = { name: nameOf(file), url: await dataUrl(file) };
    const bytes = [...others, picture].reduce((sum, { url }) => sum + url.length, 0);
    if (bytes + TEXT_BYTES > body_bytes)
      throw new Error(`the pictures of a chat have at most ${mebibytes(inBody(body_bytes))} together.`);
    const { naturalWidth: width, naturalHeight: height } = await decoded(picture);
    if (width * height > image_pixels) throw new Error(`it has over ${count(image_pixels)} pixels.`);
    return picture;
  }

  #show() {
    this.#list.hidden = !this.#added.length;
    this.#list.replaceChildren(
      ...this.#added.map((picture, at) => {
        const remove = () => this.#remove(at);
        const button = h("button", { type: "button", class: "small", "aria-label": `Remove ${picture.name}`, text: "Remove", click: remove });
        return h("li", {}, shownPicture(picture), button);
      }),
    );
  }

  #remove(at) {
    const [{ name }] = this.#added.splice(at, 1);
    this.#refuse("");
    this.#show();
    announce(`${name} is removed.`);
    (this.#list.querySelector("button") ?? get("add-picture")).focus();
  }

  #refuse(fault) {
    setText(get("picture-error"), fault);
  }
}

function imagesIn(data) {
  return [...data.files].filter((file) => file.type.startsWith("image/"));
}

function nameOf(file) {
  return file.name || "Picture";
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("it cannot be read."));
    reader.readAsDataURL(file);
  });
}

async function decoded(picture) {
  const element = shownPicture(picture);
  try {
    await element.decode();
  } catch {
    throw new Error("it is damaged.");
  }
  return element;
}

/** Bytes of pictures, in base64, that a body of this size can have. */
function inBody(bytes) {
  return Math.floor(((bytes - TEXT_BYTES) * 3) / 4);
}

function mebibytes(bytes) {
  return `${(bytes / 2 ** 20).toFixed(1).replace(".0", "")} MiB`;
}
