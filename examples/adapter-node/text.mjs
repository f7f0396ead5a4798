// The tokenizer "bytes" (cases.md): ids 0 to 255 are bytes, id n >= 256 decodes as <|n|>.

const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });

export function decode(ids) {
  let text = "";
  let run = [];
  const flush = () => {
    if (run.length) text += utf8.decode(Uint8Array.from(run));
    run = [];
  };
  for (const id of ids) {
    if (id < 256) run.push(Number(id));
    else { flush(); text += `<|${id}|>`; }
  }
  flush();
  return text;
}
