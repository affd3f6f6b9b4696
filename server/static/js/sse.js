// Parser for server-sent events.

/** Incremental parser: `push` takes text split anywhere and returns the data of the completed events. */
export class EventParser {
  #buffer = "";
  #data = [];

  push(text) {
    this.#buffer += text;
    const events = [];
    for (let line = this.#nextLine(); line !== null; line = this.#nextLine()) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line === "data" || line.startsWith("data:")) {
        const value = line.slice(5);
        this.#data.push(value.startsWith(" ") ? value.slice(1) : value);
      } // comments (": …") and other fields are ignored
    }
    return events;
  }

  // A line ends with LF, CRLF or CR. A CR at the end of the buffer may be half of a CRLF, so wait for more text.
  #nextLine() {
    const end = this.#buffer.search(/[\r\n]/);
    if (end < 0 || (this.#buffer[end] === "\r" && end === this.#buffer.length - 1)) return null;
    const line = this.#buffer.slice(0, end);
    const width = this.#buffer.startsWith("\r\n", end) ? 2 : 1;
    this.#buffer = this.#buffer.slice(end + width);
    return line;
  }
}

/** Yield the data of each event in a ReadableStream of bytes. Leaving the loop early cancels the stream. */
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
