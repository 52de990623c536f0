// Pictures and clips of the prompt: files, a sample, and the webcam.
import { element } from "./lane.js";

const LONGEST = 1600; // pixels of a picture's longer side; larger ones are made smaller here

const dataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** A picture that no side of is longer than `LONGEST`, as a PNG or JPEG. */
async function bounded(file) {
  if (!["image/png", "image/jpeg", "image/webp", "image/gif"].includes(file.type)) return dataUrl(file);
  const picture = await createImageBitmap(file);
  const scale = LONGEST / Math.max(picture.width, picture.height);
  if (scale >= 1) return dataUrl(file);
  const canvas = element("canvas", { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

export class Media {
  constructor(root, status) {
    const part = (id) => root.querySelector(`#${id}`);
    this.list = part("attached"); this.status = status; this.items = []; this.stream = null;
    this.camera = part("camera"); this.preview = part("preview"); this.toggle = part("webcam"); this.buttons = [part("shoot"), part("record")];
    const files = part("files");
    files.addEventListener("change", () => this.guard(async () => {
      for (const file of files.files) await this.addFile(file);
      files.value = "";
    }));
    part("sample").addEventListener("click", () => this.guard(async () => this.addFile(await (await fetch("/playground/sample.png")).blob(), "sample picture")));
    this.toggle.addEventListener("click", () => this.guard(() => this.stream ? this.close() : this.open()));
    part("shoot").addEventListener("click", () => this.guard(() => this.shoot()));
    part("record").addEventListener("click", () => this.guard(() => this.record()));
  }

  /** Parts of a message, as the chat API takes them. */
  get parts() {
    return this.items.map(({ kind, url }) => kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } });
  }

  async guard(work) {
    this.status.textContent = "";
    try { await work(); } catch (error) { this.status.textContent = `That did not work: ${error.message}`; }
  }

  async addFile(file, name = file.name) {
    const kind = file.type.startsWith("video/") ? "video" : "image";
    this.add(kind, kind === "video" ? await dataUrl(file) : await bounded(file), name);
  }

  add(kind, url, name) {
    const item = { kind, url };
    this.items.push(item);
    const shown = kind === "video" ? element("video", { src: url, muted: true, playsinline: true, "aria-label": name }) : element("img", { src: url, alt: name });
    const entry = element("li", {}, shown, element("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => {
      this.items.splice(this.items.indexOf(item), 1);
      entry.remove();
    } }, "×"));
    this.list.append(entry);
  }

  async open() {
    this.stream = await navigator.mediaDevices.getUserMedia({ video: { width: 640, height: 480 } });
    this.preview.srcObject = this.stream;
    this.camera.hidden = false;
    this.toggle.setAttribute("aria-expanded", "true");
    await this.preview.play();
  }

  close() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = this.preview.srcObject = null;
    this.camera.hidden = true;
    this.toggle.setAttribute("aria-expanded", "false");
  }

  shoot() {
    const canvas = element("canvas", { width: this.preview.videoWidth, height: this.preview.videoHeight });
    canvas.getContext("2d").drawImage(this.preview, 0, 0);
    this.add("image", canvas.toDataURL("image/jpeg", 0.9), "picture of the webcam");
  }

  async record() {
    const stream = this.stream, recorder = new MediaRecorder(stream, { mimeType: "video/webm" }), chunks = [];
    recorder.ondataavailable = (event) => chunks.push(event.data);
    const ended = new Promise((resolve) => recorder.onstop = resolve);
    this.buttons.forEach((button) => button.disabled = true);
    this.status.textContent = "Recording…";
    try {
      recorder.start();
      await Promise.race([ended, new Promise((resolve) => setTimeout(resolve, 2000))]);
      if (recorder.state !== "inactive") recorder.stop(); // it is inactive if the webcam was closed meanwhile
      await ended;
      if (this.stream === stream) this.add("video", await dataUrl(new Blob(chunks, { type: "video/webm" })), "clip of the webcam");
    } finally {
      this.buttons.forEach((button) => button.disabled = false);
      this.status.textContent = "";
    }
  }
}
