// Images attached to questions: read from files, shown small.
import { element } from "./dom.js";

const MOST_BYTES = 3_000_000; // of a file that is sent as it is
const MOST_PIXELS = 2048; // of the longer side of any other
const KNOWN = /^image\/(png|jpeg|webp|gif)$/;

export const isImage = ({ type }) => type.startsWith("image/");

/** Return an image file as a data URL; null if the browser cannot read it. Large and unusual ones become a smaller JPEG. */
export async function readImage(file) {
  if (KNOWN.test(file.type) && file.size <= MOST_BYTES) return dataURL(file);
  try {
    const bitmap = await createImageBitmap(file); // as the camera's data turn it
    const scale = Math.min(1, MOST_PIXELS / Math.max(bitmap.width, bitmap.height));
    const size = { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) };
    const canvas = Object.assign(document.createElement("canvas"), size);
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, size.width, size.height);
    context.drawImage(bitmap, 0, 0, size.width, size.height);
    return canvas.toDataURL("image/jpeg", 0.9);
  } catch {
    return null;
  }
}

async function dataURL(file) {
  const url = await new Promise((done) => {
    const reader = new FileReader();
    reader.onloadend = () => done(reader.result);
    reader.readAsDataURL(file);
  });
  const image = new Image();
  image.src = url ?? "";
  return image.decode().then(() => url, () => null);
}

/** Return a small view of an attached image, which a click enlarges. */
export function thumbnail({ name, image }) {
  const button = element("button", { type: "button", class: "thumb", "aria-expanded": "false", title: name }, element("img", { src: image, alt: name }));
  button.addEventListener("click", () => button.setAttribute("aria-expanded", String(button.classList.toggle("large"))));
  return button;
}
