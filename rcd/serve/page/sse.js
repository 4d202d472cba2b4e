// Server-sent events of a response body, as the texts behind "data:".

export class Lines {
  // Cuts chunks of text into lines; a line may be spread over chunks, and "\r\n" may be cut in two.
  constructor() {
    this.rest = "";
  }

  *take(chunk) {
    this.rest += chunk;
    let from = 0;
    for (let end; (end = this.rest.indexOf("\n", from)) >= 0; from = end + 1) {
      yield this.rest.slice(from, end).replace(/\r$/, "");
    }
    this.rest = this.rest.slice(from);
  }
}

export async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const lines = new Lines();
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return; // an event without its blank line was cut off, and is no event
      for (const line of lines.take(value)) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } // a line that begins with ":" is a heartbeat
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
