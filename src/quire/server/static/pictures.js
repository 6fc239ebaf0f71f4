// The pictures of a message that is being written: dropped, pasted, or chosen as files.

import { bytes, el, fill } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_BYTES = 16 << 20; // of one file, which a call carries as text of 4/3 of its length

export class Pictures {
  /** `form` takes drops, `input` takes pastes, and `tell` shows a sentence to the reader. */
  constructor(form, input, tell) {
    this.urls = [];
    this.tell = tell;
    this.strip = el("div", { class: "pictures", hidden: true });
    this.chooser = el("input", { type: "file", accept: TYPES.join(","), multiple: true, hidden: true, onchange: () => {
      this.add([...this.chooser.files]);
      this.chooser.value = "";
    } });
    this.button = el("button", { type: "button", class: "quiet", onclick: () => this.chooser.click() }, "Add a picture");
    form.addEventListener("dragover", (event) => {
      if (!this.isTaken(event.dataTransfer)) return;
      event.preventDefault();
      form.classList.add("drop");
    });
    form.addEventListener("dragleave", () => form.classList.remove("drop"));
    form.addEventListener("drop", (event) => {
      form.classList.remove("drop");
      if (!this.isTaken(event.dataTransfer)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    input.addEventListener("paste", (event) => {
      if (this.button.hidden || !event.clipboardData.files.length) return;
      event.preventDefault();
      this.add([...event.clipboardData.files]);
    });
  }

  /** Completions take no pictures. */
  setMode(mode) {
    this.button.hidden = mode !== "chat";
    if (this.button.hidden) this.take();
  }

  /** The pictures as data: URLs, which are no longer shown here. */
  take() {
    const taken = this.urls;
    this.urls = [];
    this.show();
    return taken;
  }

  isTaken(transfer) { return !this.button.hidden && transfer.types.includes("Files"); }

  async add(files) {
    for (const file of files) {
      if (!TYPES.includes(file.type)) this.tell(`${file.name} is no picture of the types PNG, JPEG, WebP, GIF and BMP.`);
      else if (file.size > MAX_BYTES) this.tell(`${file.name} has ${bytes(file.size)}, above ${bytes(MAX_BYTES)}.`);
      else {
        try { this.urls.push(await dataUrl(file)); } catch { this.tell(`${file.name} can't be read.`); }
      }
    }
    this.show();
  }

  show() {
    this.strip.hidden = !this.urls.length;
    fill(this.strip, this.urls.map((url, at) => el("figure", {}, el("img", { src: url, alt: `Picture ${at + 1}` }),
      el("button", { type: "button", class: "quiet remove", "aria-label": `Remove picture ${at + 1}`, onclick: () => {
        this.urls.splice(at, 1);
        this.show();
      } }, "×"))));
  }
}

/** The pictures of a message that was sent. */
export function sentPictures(message) {
  if (!message.pictures) return null;
  if (!message.images) return el("p", { class: "note" }, "The browser no longer has this message's pictures.");
  return el("div", { class: "pictures" }, message.images.map((url, at) => el("img", { src: url, alt: `Picture ${at + 1}` })));
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
